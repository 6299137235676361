"""The side that faces PyMongo: what its exceptions mean, and the seam to its private parts."""
