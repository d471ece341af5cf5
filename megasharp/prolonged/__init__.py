"""What changes in the course of a long run, and is decided by it: resets, response limits, the best evaluation."""
