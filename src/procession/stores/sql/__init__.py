"""What stores on SQL databases share: named parameters, `.sql` files, and the parts that differ in
their statements only.
"""
