"""Find out why the log-probabilities of a server or a rollout file differ from a model's.

    report = examine_server(open_patient("my-model", find_model("my-model")), "http://127.0.0.1:8000")
    print(report.verdict)

The modules, in the order in which an examination uses them:

evidence              token ids, and the log-probabilities of the server to explain
openai_api            a client that finds out which log-probabilities a server reports
probes                the requests that are sent to the server
rescoring             scores the same ids with the model, or with a changed copy of the model
hypothesis            one possible cause, and the log-probabilities that it predicts
model_hypotheses      config values that a server ignores, dtypes, quantisation, experts
weight_hypotheses     stale tensors, adapters
sampling_hypotheses   temperature, truncation, penalties
prompt_hypotheses     special tokens, chat templates, tokenizers
diagnosis             measures the noise of rounding, and decides which hypothesis explains the evidence
doctor_report         the result
examine               the whole examination of a server or a rollout file
"""

from padfree.tools.doctor.doctor_report import DoctorReport
from padfree.tools.doctor.examine import examine_rollouts, examine_server, open_patient, read_some_rollouts

__all__ = ["DoctorReport", "examine_rollouts", "examine_server", "open_patient", "read_some_rollouts"]
