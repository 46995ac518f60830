"""What is done by hand elsewhere: answers checked, kernels compared, choices explained."""
