"""What tests, benchmarks and docs share.

line_server    a small server engine, the second one behind `ServerApi`
"""
