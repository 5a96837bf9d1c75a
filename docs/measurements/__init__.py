"""What the pages' numbers and figures come from: one module per page, each with `measure`, `table` and `draw`."""
