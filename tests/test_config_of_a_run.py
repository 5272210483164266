"""The config that a run folder keeps is enough to go on with the run, and to evaluate it."""

import json

from fasttrain.cli import main
from tests.helpers import Mlp, Recorder


class Stop(Recorder):
    def stepped(self, record):
        if record["step"] == 2:
            self.run.request_stop("test")


class Loud(Mlp):
    def build_model(self):
        print("the model is built")
        return super().build_model()


def stopped(cls, tmp_path):
    run = {"dir": str(tmp_path), "id": "one"}
    cls(batch_size=8, steps=6, log={"every": 1}, run=run, observers=[Stop()]).fit()
    return tmp_path / cls.__name__.lower() / "one"


def test_a_run_started_from_python_is_taken_up_by_the_command_that_status_names(tmp_path, capsys):
    run = stopped(Mlp, tmp_path)
    main(["status", str(run)])
    (command,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("resume "))
    words = command.split(" -m fasttrain ")[1].split()
    assert main(words) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("done", 6)
    assert [path.name for path in tmp_path.iterdir()] == ["mlp"]


def test_what_a_model_prints_stays_out_of_the_one_object_of_json(tmp_path, capsys):
    run = stopped(Loud, tmp_path)
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["step"] == 2
    assert "the model is built" in told.err
