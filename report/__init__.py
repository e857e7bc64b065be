"""Tables, figures, the page and the film."""
