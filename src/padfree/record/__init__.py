"""The files of a run folder.

file_names     names of the files
run_folder     marks and locks the folder of a run
start_over     moves the files of an earlier run away (checkpoint.resume=false)
run_files      opens all files that a run writes
metrics_file   writes one line of metrics per step
events         writes other events, e.g. the start of the run
trackers       sends metrics to TensorBoard, W&B, trackio and MLflow
"""
