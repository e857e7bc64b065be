# Moves the new study up to study/ when the old one goes. Run in the root of a worktree; then `git add -A`, look, commit.
set -e
git rm -rq study/claims.py study/documents.py study/entries.py study/exhibit.py study/grid.py study/low_rate.py study/reproduce.py \
  study/result_plots.py study/searches.py study/store.py study/stored.py study/tables.py study/validation.py study/variants.py \
  study/bootstrap.py study/collapse.py study/README.md study/pages study/figures study/results \
  study/rewards/halfway.py study/rewards/noisy.py docs/headlines.html tests/study/test_study.py tests/study/test_study_variants.py
git rm -q --cached study/one/__init__.py; rm -f study/one/__init__.py
mkdir -p study/results
for name in $(ls study/one | grep -v __pycache__); do
  [ -d study/$name ] && { git mv -k study/one/$name/* study/$name/ 2>/dev/null || true; mv -n study/one/$name/* study/$name/ 2>/dev/null || true; } || git mv study/one/$name study/$name
done
git mv tests/study/test_one.py tests/study/test_study.py
sed -i 's/study\.one/study/g; s#study/one#study#g; s/parents\[2\])/parents[1])/; s/FOLDER\.parents\[1\]/FOLDER.parent/g' study/*.py
sed -i 's/study\.one/study/g' tests/study/test_study.py
sed -i 's#study/one#study#g; s#\.\./\.\./docs#../docs#g' study/README.md
sed -i 's#study/one#study#g' study/pages/*.md
rm -rf study/one
