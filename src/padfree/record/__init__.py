"""The files of a run folder.

file_names     names of the files
run_folder     ownership of the folder, and the lock of the process that writes to it
run_files      opens the files of a run together
metrics_file   one line per step
events         events of a run other than steps
trackers       forward metrics to TensorBoard, W&B, trackio and MLflow
"""
