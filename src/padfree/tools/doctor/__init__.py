"""Find out why the log-probabilities of a server or a rollout file differ from a model's.

    report = examine_server(open_patient("my-model", find_model("my-model")), "http://127.0.0.1:8000")
    print(report.verdict)

examine                the whole examination, and its order
probes, openai_api     requests to the server
evidence               the log-probabilities that the server reports
hypothesis             a possible cause, and the log-probabilities that it predicts
*_hypotheses           the causes: model, weights, sampling, prompts
rescoring              log-probabilities of the model, or of a changed copy
diagnosis              decides which cause explains the evidence
doctor_report          the result
"""

from padfree.tools.doctor.doctor_report import DoctorReport
from padfree.tools.doctor.examine import examine_rollouts, examine_server, open_patient, read_some_rollouts

__all__ = ["DoctorReport", "examine_rollouts", "examine_server", "open_patient", "read_some_rollouts"]
