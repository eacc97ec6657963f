"""Static figures, one file a notebook: take data, return a Figure that says in words what it shows."""
