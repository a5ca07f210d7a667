"""What every room uses: atomic files, random state, precision flags, option fields, text tables."""
