"""Mistakes at both commands: each is one line and exit code 2, nothing is lost, nothing changed."""

import dataclasses
import errno
import io
import json
import locale
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import matplotlib
import pytest
import torch
from helpers import QUICK, ROOT, SCRIPTS, change_config, fails, metrics, write_fence

import eval as evaluation
import train
import vpo
from engine import __version__
from engine.config import Config, check_ranges, flag_of, peak_rate
from engine.errors import as_command, explain_machine, task_code
from engine.files import check_free, owned
from engine.runs import checkpoints, find_run, load_run
from rewards import UserError

TOY = [*QUICK, *shlex.split("--method grpo vpo --steps 2 --save-every 1")]
WITH_DATA = "flags = ('data',)\n    def __init__(self, data=''): pass"
VPO_ALONE = ["--method", "vpo", "--eval-problems", "0"]
UNLUCKY = """
    def reward(self, problem, answer):
        if Path("run/vpo/checkpoint-000001").exists():
            raise ValueError("no luck")
        return super().reward(problem, answer)
"""
WITH_UMLAUTS = """
    objectives = ("änn", "bob", "cid")
    words = ("zäun", *Fence.words[1:])

    def tiny_prompt(self, problem):
        return "zäun"
"""


def files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in paths}


# Flags.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--metod vpo", "--help lists all flags; did you mean --method?"),
        ("--method VPO", "did you mean vpo?"),
        ("--method grpo,vpo", "or several with blanks between"),
        ("--method grpo --subset 2", "--subset 2: not used by grpo"),
        ("--pool 1", "--pool 1: must hold at least one rollout of --m 2 answers"),
        # A divisor of grpo's 4 prompts.
        ("--updates 4 --method grpo vpo", "must divide the 2 prompts of a step of vpo"),
        ("--subset 4", "a set of s = 4 rollouts needs a group of more, and G is 3"),
        ("--method max_at_k --group-size 2", "s = 2 rollouts needs a group of more, and G is 2"),
        ("--lr fast", "--lr fast: must be a rate of 1e-12 to 1, or METHOD=RATE"),
        ("--lr vpo=0.1", "--lr vpo=0.1: names no rate for grpo; add grpo=RATE"),
        ("--lr 1e-3 gpro=1e-3", "METHOD=RATE of a known method; did you mean grpo?"),
        ("--lr 1e-3 vpo=1e-3 2e-3", "--lr 1e-3 vpo=1e-3 2e-3: two rates for all methods; drop one"),
        ("--lr 1e-3 vpo=1e-3 vpo=2e-3", "two rates for vpo; drop one"),
        ("--log wandb", "--log wandb: not installed; pip install wandb"),
        ("--size 5", "task toy has no such flag; drop it, or name it in Task.flags"),
        ("--model no/such/model", "--model no/such/model: cannot be loaded"),
        ("--model /nope", "no such folder, and no id of the Hub"),
        ("--task musique", "--task musique: needs --data FILE"),
        ("--model m --max-new-tokens 0", "--max-new-tokens 0: a language model needs a number"),
        ("--model m --device mps", "--device mps: cannot compute in float32 here ("),
        (f"--out {'a' * 20_000}", "File name too long: 'aaa"),
        ("--out r\udcff", "--out 'r\\udcff' must be text"),
        ("--out /proc/run", "/proc/run: cannot be written (No such file or directory)"),
    ],
)
def test_a_wrong_flag_is_named_before_any_minute_is_spent(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(train, "progress_bar", None)  # training would call it
    fails([*TOY, *shlex.split(arguments)], capsys, "train.py: error: ", message)
    assert not list(Path().iterdir()), "a command that failed must not claim its folder"


def test_the_rate_that_names_a_method_counts():
    """Guards against `--lr vpo=4e-5 2e-5`, which trained VPO at 2e-5."""
    for lr in (["vpo=4e-5", "2e-5"], ["2e-5", "vpo=1", "vpo=4e-5"]):
        config = Config(lr=lr)
        assert [peak_rate(config, name) for name in ("vpo", "grpo")] == [4e-5, 2e-5]


def test_every_number_has_a_range():
    """Guards against a number that takes all memory or has no effect."""
    for field in dataclasses.fields(Config):
        if field.type in (int, float):
            low, high = field.metadata["range"]
            for value in (low - 1, 2 * high):
                with pytest.raises(UserError, match=f"^{flag_of(field.name)} .*: must be .* to "):
                    check_ranges(Config(**{field.name: value}))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lambda x, e: x.scalars, "3 x 3 finite advantages (P, G), not tensor"),
        (lambda x, e: x.scalars.sum(-1) / 0, "3 x 3 finite advantages (P, G), not tensor"),
        (lambda x, e: x.scalars[..., 0] > 0, "3 x 3 finite advantages (P, G), not tensor"),
        (lambda x, e: None, "3 x 3 finite advantages (P, G), not None"),
        (lambda x, e: x.scalars[..., 0], "0 for rewards that are equal"),
        (lambda x, e: x.scalars[..., 0] - x.scalars[:, :1, 0], "or differ by rounding"),
    ],
)
def test_a_wrong_method_is_named_before_any_minute_is_spent(method, message, monkeypatch, capsys):
    monkeypatch.setitem(vpo.ADVANTAGES, "mine", method)
    fails([*TOY, "--method", "mine"], capsys, "--method mine: must return", message)
    assert not Path("runs").exists()


def test_a_method_that_gives_some_groups_nothing_is_named(monkeypatch, capsys):
    """Guards against a training on the first groups alone, which the three that are tried do not show."""
    monkeypatch.setitem(vpo.ADVANTAGES, "mine", lambda x, e: vpo.center(x.scalars[:3, :, 0]))
    fails([*TOY, "--method", "mine"], capsys, "mine, step 1: --method mine: must return")


def test_what_ones_own_method_raises_keeps_its_traceback(monkeypatch):
    monkeypatch.setitem(vpo.ADVANTAGES, "mine", lambda scored, options: int("mine"))
    with pytest.raises(ValueError, match="mine"):
        train.main([*TOY, "--method", "mine"])


# Run folders.


def test_a_refused_command_changes_nothing(toy_run, capsys, monkeypatch):
    """Whatever is refused: no folder, no config, no file of the run is touched, and no minutes are spent."""
    monkeypatch.setattr(evaluation, "run_all", lambda *args: pytest.fail("minutes are spent"))
    before = files(toy_run)
    for name in ("other", "empty"):
        shutil.copytree(toy_run, name)
    change_config(Path("other"), task="fence")
    for method in ("grpo", "vpo"):
        shutil.rmtree(f"empty/{method}")
    Path("a-file").touch()
    Path("saved/vpo-0.5").mkdir(parents=True)
    refused = {
        "train --out run --method multi_rlvr --lr 0.5": "grpo has --lr 0.001, not 0.5; drop",
        "train --out run --method multi_rlvr --steps 3": "with --steps 4, not 3",
        "train --out run --task toy": "already holds grpo, vpo; --resume goes on with it",
        "train --resume --out run/vpo": "run/vpo holds no run; name the folder of one",
        "train --resume --out run/start": "run/start/config.json: cannot be read as that of a run",
        "train --out run --resume --m 3": "with --m 2, not 3; drop the flag, or take another --out",
        "train --out run --resume --data x": "holds another run, with --data '', not ",
        "train --out run/config.json": "--out run/config.json: not empty, and no run of train.py",
        "train --out new --max-new-tokens 4000 --task toy": "need a context",
        "train --out new --model run": "--model run: a run folder; name a checkpoint in it",
        "train --out new --model ./rum": "did you mean run?",
        "train --out new --model a-file": "--model a-file: cannot be loaded",
        "eval run ./run": "run: differs from run in nothing",
        "eval run other": "the runs differ in --task: fence, toy; one table is",
        "eval empty": "empty: holds no checkpoint yet",
        "eval run --temperature 0": "--temperature 0.0: must be 0.001 to 1000",
        "eval run --pool 1": "--pool 1: must hold one rollout of the run's 2 answers",
        "eval run --mix 0.5 nan": "--mix nan: must be 0 to 1",
        "eval run --mix 0.3333333 0.33333334": "two are equal to six digits; drop one",
        "eval run --mix 0.5 --save-mixed saved": "--save-mixed saved: holds vpo-0.5; name another",
        "eval run --out a-file": "a-file: cannot be written (File exists); name another",
        "eval run --out /proc/table": "/proc/table: cannot be written",
        "eval rum": "rum: there is no such run; did you mean run?",
        "eval run/vpo": "run/vpo/config.json: cannot be read as that of a run",
    }
    for command, message in refused.items():
        script, *arguments = command.split()
        fails(arguments, capsys, f"{script}.py: error: ", message, command=SCRIPTS[script])
    assert files(toy_run) == before and not Path("new").exists()


# A process that says whether it has the folder, and keeps it.
TRY = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from engine.files import owned
from rewards import UserError
try:
    with owned(Path("run")):
        print("has it", flush=True)
        input()
except UserError as error:
    print(error)
"""


def test_of_several_that_begin_at_once_one_has_the_folder():
    """Guards against 129 log lines of 90 steps. And a killed process does not block."""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", TRY], **options) for _ in range(4)]
    lines = [process.stdout.readline() for process in processes]
    refused = [line for line in lines if line.startswith("--out run: another process")]
    assert lines.count("has it\n") == 1 and len(refused) == 3, lines
    with pytest.raises(UserError, match="^--out run: another process trains in it"):
        check_free(Path("run"))
    for process in processes:
        process.kill()
        process.communicate()
    with owned(Path("run")):
        pass


def test_a_second_command_is_refused_while_the_first_trains(toy_run, capsys):
    """An evaluation is not: it reads. Guards against two curves in one log."""
    before = files(toy_run)
    with owned(toy_run):
        for flags in ("--resume", "--method multi_rlvr", ""):
            fails(["--out", "run", *flags.split()], capsys, "--out run: another process trains")
        evaluation.main(["run", "--out", "table"])
    assert files(toy_run) == before


def test_a_run_that_another_command_trained_in_the_meantime_stays(monkeypatch, capsys):
    """Guards against its weights under the flags of the command that was slower to begin."""

    def slow_start(*arguments):
        monkeypatch.setattr(train, "start_policy", start_policy)
        train.main(["--out", "run", *TOY, "--eval-problems", "0"])
        return start_policy(*arguments)

    start_policy = train.start_policy
    monkeypatch.setattr(train, "start_policy", slow_start)
    fails(["--out", "run", *TOY, "--seed", "1"], capsys, "another run, with --seed 0, not 1")
    assert load_run(Path("run")).config.seed == 0


def test_a_crash_before_the_first_checkpoint_leaves_the_folder_reusable(monkeypatch, capsys):
    """With other methods, and with one that had begun."""
    with monkeypatch.context() as patch:
        patch.setattr(train, "train_step", Mock(side_effect=TypeError))
        for arguments in (TOY, ["--resume"]):
            with pytest.raises(TypeError):
                train.main(["--out", "run", *arguments])
    flags = "--method vpo --subset 2 --lr 0.001 --eval-problems 0"
    train.main(["--out", "run", *TOY, *flags.split()])
    assert load_run(Path("run")).config.lr == ["0.001"]
    train.main(["--out", "run", "--method", "grpo"])
    assert len(metrics(Path("run/vpo"))) == len(metrics(Path("run/grpo"))) == 2


def test_a_method_joins_with_the_flags_of_the_run(toy_run, capsys):
    """From the same start, and none of them is repeated; without evaluation the checkpoints are named."""
    start = files(toy_run / "start")
    change_config(toy_run, lr=["1e-3", "multi_rlvr=1e-3"])
    flags = "--out run --method multi_rlvr --lr multi_rlvr=2e-3 --eval-problems 0"
    train.main(flags.split())
    out = capsys.readouterr().out
    assert "run/METHOD/checkpoint-000004" in out and "python eval.py run" in out
    assert load_run(toy_run).config.method == ["grpo", "vpo", "multi_rlvr"]
    first = metrics(toy_run / "multi_rlvr")[0]
    assert first["lr"] == pytest.approx(2e-3)  # of so few steps none rises
    assert files(toy_run / "start") == start
    train.main(["--out", "run", "--resume", "--lr", "vpo=1e-3", "--eval-problems", "0"])


def test_a_run_of_another_version_goes_on_without_the_flags_that_are_gone(toy_run, capsys):
    change_config(toy_run, sampler="iid", beam_width=3)
    train.main(["--out", "run", "--resume", "--eval-problems", "0"])
    told = "run: flags of another version are ignored: --beam-width 3, --sampler iid\n"
    assert capsys.readouterr().err.count(told) == 1
    assert "sampler" not in (toy_run / "config.json").read_text()
    text = (toy_run / "config.json").read_text().replace(f'"vpo": "{__version__}"', '"vpo": "3.3"')
    (toy_run / "config.json").write_text(text)
    evaluation.main(["run", "--problems", "2"])
    assert "run: trained by version 3.3; docs/changes.md says" in capsys.readouterr().err


def test_a_config_that_was_edited_is_named(toy_run, capsys):
    change_config(toy_run, m="two")
    path = toy_run / "config.json"
    told = f"{path}: cannot be read as that of a run"
    edited = [
        path.read_text(),
        "{",
        "{}",
        '{"flags": []}',
        '{"flags": {}, "data": null}',
        '{"flags": {}, "history": ["x"]}',
    ]
    for text in edited:
        path.write_text(text)
        fails(["run"], capsys, told, command=evaluation.main)
        fails(["--out", "run", "--resume"], capsys, told)


def test_an_own_task_is_found_from_another_folder(capsys, monkeypatch):
    """And its absence is named."""
    Path("own").mkdir()
    write_fence(WITH_DATA, "own/mine.py")
    Path("own/data").touch()
    flags = "--task own/mine.py --data own/data --method vpo --eval-problems 0 --out run"
    train.main([*TOY, *flags.split()])
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    train.main(["--out", "../run", "--method", "grpo", "--data", "../own/data"])
    Path("../own/mine.py").rename("mine.py")
    fails(["../run"], capsys, "own/mine.py: is not there", command=evaluation.main)
    config = Path("../run/config.json")
    text = config.read_text("utf-8").replace("own/mine.py", "elsewhere/mine.py")
    config.write_text(text, "utf-8")
    evaluation.main(["../run", "--problems", "1"])


# A disk that is full, or cannot be written.


def test_what_the_system_refuses_is_one_line(capsys):
    """But for what a user's own code was refused, and for errors that a user cannot mend."""
    error = OSError(errno.EROFS, "Read-only file system", "a-file")
    command = as_command("eval.py")(Mock(side_effect=error, __name__="main"))
    fails([], capsys, "Read-only file system: 'a-file'", command=command)
    with pytest.raises(OSError, match="seek"), as_command("eval.py"):
        raise OSError(errno.ESPIPE, "seek")
    with pytest.raises(OSError, match="mine"), as_command("eval.py"), task_code("one"):
        raise OSError(errno.EROFS, "mine")


def test_an_old_checkpoint_that_cannot_be_removed_stops_nothing(monkeypatch):
    """As on NFS or Windows, where a file in it is open."""

    def keep(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(shutil, "rmtree", keep)
    train.main(["--out", "run", *TOY, "--method", "vpo", "--steps", "5", "--eval-problems", "0"])
    assert checkpoints(Path("run/vpo"))[-1].name == "checkpoint-000005"
    train.main(["--out", "run", "--method", "vpo", "--resume"])


def test_a_full_disk_is_named_and_leaves_nothing_half(capsys, monkeypatch):
    """torch.save leaves a part of the file, and may raise an error of its own; shutil lists the files one by one."""

    def fail(state, path):
        Path(path).write_bytes(b"a part")
        raise RuntimeError("[enforce fail at inline_container.cc] . unexpected pos 122 vs 118")

    monkeypatch.setattr(torch, "save", fail)
    text = "run/grpo/checkpoint-000001: cannot be written ([enforce fail"
    told = "make room: its disk has ", " MiB; go on with: python ", "--resume --out run"
    fails(["--out", "run", *TOY], capsys, text, *told)
    assert not list(Path("run").rglob("*.tmp*")) and not list(Path("run/grpo").glob("checkpoint-*"))
    failed = [("a", "b", "[Errno 28] No space left on device")] * 3
    monkeypatch.setattr(shutil, "copytree", Mock(side_effect=shutil.Error(failed)))
    told = "other/start: cannot be written ([Errno 28] No space left on device); make room: its"
    fails(["--out", "other", *TOY], capsys, told)


def test_a_folder_in_which_no_run_could_begin_is_reusable():
    """Guards against a full disk whose user has made room, and is told to take another folder."""
    Path("run").mkdir()
    Path("run/.config.json.tmp").touch()
    Path("run/.DS_Store").touch()
    assert find_run(Path("run"), resume=False) is None


def test_what_other_systems_leave_beside_files_is_no_part_of_a_run(toy_run):
    """A Mac's "._config.json" is 4 KiB of bytes. Guards against a good run that is called damaged."""
    folders = [toy_run, toy_run / "start", *checkpoints(toy_run / "vpo")]
    for path in [file for folder in folders for file in folder.iterdir()]:
        path.with_name(f"._{path.name}").write_bytes(b"\x00\x05\x16\x07\xff" * 800)
    train.main(["--out", "run", "--resume", "--steps", "5", "--eval-problems", "0"])
    evaluation.main(["run", "--problems", "1", "--pool", "2"])
    Path("._zebra").mkdir()
    with pytest.raises(UserError, match="no such run$"):
        load_run(Path("zebra"))


# A machine that is not ours.


@pytest.mark.draws
def test_a_machine_with_settings_of_its_own():
    """ASCII, LaTeX that is not there, nothing to be written: guards against a warm-up or evaluation lost at its end."""
    Path("runs").touch()  # so that runs/start cannot be made, as in a folder that is read-only
    write_fence(WITH_UMLAUTS)
    flags = "--task mine.py --method vpo --warm-steps 1 --steps 1 --out run --jobs 1"
    usual = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        with matplotlib.rc_context({"text.usetex": True}), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stderr", io.StringIO())
            train.main([*TOY, *flags.split()])
            assert "the warm-up is kept in this run alone: runs/start/" in sys.stderr.getvalue()
    finally:
        locale.setlocale(locale.LC_CTYPE, usual)
    assert Path("run/best_at_k.png").stat().st_size


def test_what_ascii_lacks_is_printed_all_the_same(monkeypatch):
    """Guards against a traceback in place of the table."""
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "ascii"))
    with as_command("eval.py"):
        print("0.350 ± 0.000")
    sys.stdout.flush()
    assert printed.getvalue() == b"0.350 \\xb1 0.000\n"


def test_a_stop_outside_of_the_training_is_told(capsys, monkeypatch):
    """Guards against an empty line where SIGTERM comes in a warm-up or evaluation."""
    with pytest.raises(SystemExit) as stop, as_command("train.py"):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)  # sent twice: no traceback while the first is told
    assert stop.value.code == 130 and "give the same command again" in capsys.readouterr().err
    monkeypatch.setattr(evaluation, "evaluate_run", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit):
        train.main([*TOY, "--out", "run"])
    assert "stopped; table and figures: python eval.py run" in capsys.readouterr().err


@pytest.mark.linux
@pytest.mark.parametrize("flags", ["", "-u"])
def test_a_reader_that_has_gone_and_a_full_stdout(toy_run, flags):
    """Guards against a traceback after `| head`, and against an error that names no file, or the wrong one."""
    code = "from engine import errors\nfrom engine.files import writing\nfrom pathlib import Path\n"
    code += "errors.quieten_transformers = str  # which takes a second\n"
    code += "with errors.as_command('eval.py'), writing(Path('run')):\n    print('x' * 99999)\n"
    command = [sys.executable, *flags.split(), "-c", code]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    options = {"stderr": subprocess.PIPE, "text": True, "env": environment}
    reader, writer = os.pipe()
    os.close(reader)
    gone = subprocess.run(command, stdout=writer, **options)
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (141, "")
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(command, stdout=full, **options)
    told = "eval.py: error: stdout: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_commands_in_a_thread(toy_run, capsys):
    """As a notebook server calls them. Guards against "signal only works in main thread"."""
    run = threading.Thread(target=evaluation.main, args=(["run", "--problems", "1"],))
    run.start()
    run.join()
    assert "figures in run" in capsys.readouterr().out


def test_wandb_without_a_key_is_told_before_any_minute_is_spent(capsys, monkeypatch):
    Path("wandb.py").write_text("def login(): raise ValueError('No API key')", "utf-8")
    monkeypatch.syspath_prepend(".")
    told = "--log wandb: No API key; run `wandb login`, or set WANDB_MODE=offline"
    fails([*TOY, "--log", "wandb"], capsys, told)
    assert not Path("runs").exists()


def test_results_are_written_before_they_are_printed(toy_run, monkeypatch):
    """Guards against an evaluation that is lost where its reader, such as `head`, has gone."""
    (toy_run / "eval.json").unlink()
    monkeypatch.setattr(evaluation, "print_table", None)
    with pytest.raises(TypeError):
        evaluation.main(["run"])
    assert (toy_run / "eval.json").exists()


def test_a_file_of_problems_must_stay_what_it_was(capsys):
    """Guards against two sets of problems in one curve."""
    write_fence(WITH_DATA)
    flags = "--task mine.py --data data --method grpo --eval-problems 0 --out"
    Path("data").write_text("one", "utf-8")
    train.main([*TOY, *flags.split(), "run"])
    evaluation.main(["run", "--problems", "1"])
    Path("data").write_text("two", "utf-8")
    changed = "data: is not there, or not the file that run was trained on"
    fails(["--out", "run", "--resume"], capsys, changed)
    fails(["run"], capsys, changed, command=evaluation.main)
    train.main([*TOY, *flags.split(), "other"])
    write_fence(f"{WITH_DATA}  # and other demonstrations")
    train.main([*TOY, *flags.split(), "third"])
    assert len(list(Path("runs/start").iterdir())) == 3, "the warm-up of other problems"


# Memory.


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "MPS backend out of memory (MPS allocated: 8.10 GB)",
        "[enforce fail] DefaultCPUAllocator: you tried to allocate 983 bytes",
    ],
)
def test_errors_of_memory_are_explained(message):
    """Guards against a traceback where a library found no memory, and against other errors that are taken for it."""
    told = f"out of memory .{re.escape(message)}.; .*--lora-rank"
    with pytest.raises(UserError, match=told), explain_machine():
        raise RuntimeError(message)
    with pytest.raises(RuntimeError, match="shapes"), explain_machine():
        raise RuntimeError("shapes do not match")


# The evaluation.


def test_evaluations_do_not_overwrite_one_another(toy_run):
    """Other settings, or --out: the run's own table and figures stay."""
    before = files(toy_run)
    evaluation.main(["run", "--split", "validation", "--problems", "3", "--figure-format", "svg"])
    assert Path("run/eval-validation-3x4-T0.7/best_at_k.svg").exists()
    evaluation.main(["run", "--out", "elsewhere"])
    assert Path("elsewhere/eval.json").read_bytes() == before["run/eval.json"]
    assert {name: data for name, data in files(toy_run).items() if "eval-" not in name} == before


def test_a_run_that_is_not_finished_or_has_damaged_logs_is_evaluated(toy_run, capsys):
    """Lost, cut off or with a field that is missing: the curves lack a point, the table does not."""
    change_config(toy_run, steps=300)
    (toy_run / "grpo" / "metrics.jsonl").unlink()
    log = toy_run / "vpo" / "metrics.jsonl"
    first, second, *_ = log.read_text().splitlines()
    log.write_text(f'{first.replace("answers", "answrs")}\n{second}\n{{"step": 3, "rew')
    evaluation.main(["run"])
    assert "vpo: step 4 of 300" in capsys.readouterr().out


# Tasks, in a run.


def test_a_reward_that_raises_shows_its_traceback_and_where(capsys):
    """And the run goes on after the task was mended, once a user has said that all other rewards stay."""
    write_fence(UNLUCKY)
    with pytest.raises(ValueError, match="no luck") as raised:
        train.main([*TOY, "--task", "mine.py", "--out", "run", *VPO_ALONE])
    notes = " ".join(raised.value.__notes__)
    assert "method vpo, step 2" in notes and "--resume --out run" in notes
    assert "Task.reward of problem 'train-2', answer '" in notes
    assert str(raised.traceback[-1].path).endswith("mine.py")
    write_fence("")
    told = "delete its line in run/config.json"
    fails(["--resume", "--out", "run"], capsys, "mine.py: is not there, or not the file", told)
    record = json.loads(Path("run/config.json").read_text("utf-8"))
    del record["data"][str(Path("mine.py").absolute())]
    Path("run/config.json").write_text(json.dumps(record), "utf-8")
    train.main(["--resume", "--out", "run"])
    assert len(metrics(Path("run/vpo"))) == 2
