"""The locks themselves. `base` is the face that all of them share; the other modules hold one mechanism each."""
