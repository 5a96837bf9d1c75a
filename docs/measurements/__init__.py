"""What the pages' numbers and figures come from: one module a page, each with `measure`, `table` and `draw`."""
