"""One HTML file of one run or several: what a person should see, without a network."""
