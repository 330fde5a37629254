"""What helps to find a start: reductions, the mean field, leaked maps, several layers."""
