"""Networks: find the sites by observing one run, count cost, replace layers, describe the change and rebuild it."""
