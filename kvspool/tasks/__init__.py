"""Tasks: workers share the records of a log; each record is given to one living worker, and acknowledged in any order."""
