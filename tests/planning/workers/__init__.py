"""Scripts that tests of the planner start in processes of their own."""
