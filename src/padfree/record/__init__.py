"""What a run leaves in its folder.

files        names of the files of a run folder
run_folder   whose folder it is, and who writes there now
metrics      one line a step
events       what happened to a run besides its steps
trackers     metrics passed on to TensorBoard, W&B and trackio
"""
