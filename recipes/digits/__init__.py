"""The small vision transformer that is included in the package, trained on the handwritten digits of scikit-learn."""
