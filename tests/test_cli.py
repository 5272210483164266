"""The command line as a user meets it: commands, exit codes, messages."""

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.commands import DIGITS, ROOT, alive, descendants, end, environment, run, start, wait_for_step

SHORT = ["epochs=1", "evaluate.every=1000", "log.every=10"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run, its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("runs")
    done = run("--config", DIGITS, *SHORT, f"run.dir={folder}", "run.id=a")
    assert done.returncode == 0, done.stderr
    return folder / "resnet-digits" / "a", done


def test_a_run_prints_lines_and_writes_its_folder(finished):
    folder, done = finished
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"
    assert "step 20/23" in done.stdout
    assert "\r" not in done.stdout


def test_json_prints_one_object_and_nothing_else(tmp_path):
    done = run("--config", DIGITS, "--json", "steps=2", f"run.dir={tmp_path}")
    assert json.loads(done.stdout)["steps"] == 2


def test_evaluate_gives_the_metrics_of_the_run(finished):
    folder, _ = finished
    done = run("evaluate", str(folder), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["step"] == 23
    assert told["metrics"] == json.loads((folder / "summary.json").read_text())["metrics"]
    assert "accuracy" in run("evaluate", str(folder / "checkpoints" / "step-23")).stdout
    assert json.loads(run("evaluate", str(folder.parent), "--json").stdout) == told  # the newest of a name
    nowhere = run("evaluate", str(folder.parent / "nowhere"))
    assert nowhere.returncode == 2
    assert "evaluate of" in nowhere.stderr


def test_status_answers(finished):
    folder, _ = finished
    done = run("status", str(folder), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "done"


def test_the_saved_config_makes_the_same_run_again(finished, tmp_path):
    folder, _ = finished
    done = run("--config", str(folder / "config.yaml"), f"run.dir={tmp_path}", "run.id=b")
    assert done.returncode == 0, done.stderr
    one, other = (json.loads((f / "summary.json").read_text()) for f in (folder, tmp_path / "resnet-digits" / "b"))
    assert (one["final_loss"], one["metrics"], one["config_hash"]) == (
        other["final_loss"],
        other["metrics"],
        other["config_hash"],
    )


def test_explain_compile_tells_what_torch_makes_of_the_model():
    asked = ["explain", "--config", DIGITS, "--compile", "compile=blocks", "compile.backend=aot_eager"]
    told = json.loads(run(*asked, "--json").stdout)["compile"]
    assert (told["graphs"], told["breaks"], told["fallbacks"]) == (6, [], [])  # three kinds of blocks, and evaluation
    assert "torchvision/models/resnet.py" in {entry["file"] for entry in told["recompilations"]}
    assert told["remarks"][0].startswith("3 graphs of 3 BasicBlock, no graph breaks, ")
    shown = run(*asked).stdout.splitlines()
    assert shown[0].startswith("3 graphs of 3 BasicBlock")
    assert "    6 graphs of forward passes, 0 of them from the cache" in shown


def test_explain_compile_without_anything_to_compile_says_what_to_add():
    done = run("explain", "--config", DIGITS, "--compile")
    assert done.returncode == 2
    assert "add compile=blocks or compile=model" in done.stderr
    assert "--compile belongs to explain" in run("--config", DIGITS, "--compile").stderr


def test_explain_names_who_acts_on_each_line():
    done = run("explain", "--config", DIGITS, "gradient_clipping=norm")
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line and not line.startswith(" ")}
    assert lines["gradients"].endswith("gradient_clipping=norm")
    assert lines["updated"].endswith("schedule=one_cycle")
    told = json.loads(run("explain", "--config", DIGITS, "--json").stdout)
    assert told["step"]["optimizer"] == ["optimizer=sgd"]
    assert told["config"]["batch_size"] == 64


FIVE = """\
trainer: recipes.resnet:ResNet
batch_sice: 64
epochs: many
optimizer: {name: sdg, lr: 0.1}
gradient_clipping: {name: norm, max_nrom: 1.0}
schedule: {name: cosine, warmup: -3}
batch_size: 8
"""


@pytest.mark.parametrize("command", [["validate"], []], ids=["validate", "train"])
def test_five_mistakes_are_told_at_once_without_torch(tmp_path, command):
    config = tmp_path / "five.yaml"
    config.write_text(FIVE)
    done = run(*command, "--config", str(config))
    assert done.returncode == 2
    told = done.stdout + done.stderr
    for line, word in ((2, "batch_size"), (3, "epochs"), (4, "sgd"), (5, "max_norm"), (6, "warmup")):
        assert any(f"five.yaml:{line}:" in one and word in one for one in told.splitlines()), told
    assert "5 problems" in told
    code = "import sys; from fasttrain.cli import main; code = main(sys.argv[1:])\n"
    code += "sys.exit(9 if 'torch._C' in sys.modules else code)"
    again = subprocess.run(
        [sys.executable, "-c", code, *command, "--config", str(config)], cwd=ROOT, capture_output=True
    )
    assert again.returncode == 2


def test_validate_as_json(tmp_path):
    config = tmp_path / "five.yaml"
    config.write_text(FIVE)
    told = json.loads(run("validate", "--config", str(config), "--json").stdout)
    assert told["ok"] is False
    assert len(told["problems"]) == 5
    assert {"key", "file", "line", "message", "suggestion"} <= set(told["problems"][0])
    assert json.loads(run("validate", "--config", DIGITS, "--json").stdout) == {"ok": True, "problems": []}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trian", "--config", DIGITS], "did you mean 'train'?"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        ([], "--config FILE is missing"),
        (["--config", DIGITS, "precision=fp61"], "fp16"),
        (["--config", DIGITS, "optimzer.lr=1"], "optimizer"),
        (["--config", "resnet_digit.yaml"], "did you mean 'configs/resnet_digits.yaml'?"),
        ([DIGITS], f"a config goes after --config: --config {DIGITS}"),
        (["--config", DIGITS, "nonsense"], "is no key=value; write it as nonsense=..."),
        (["--config", DIGITS, "validate"], "a command goes first: validate --config FILE"),
        (["--config", DIGITS, "--epochs=3"], "settings have no dashes: epochs=3"),
        (["--config", DIGITS, "--epochs", "3"], "settings have no dashes: epochs=..."),
        (["--config", DIGITS, "device=cuda:x"], "device"),
        (["--config", DIGITS, "--bogus"], "--bogus"),
        (["status"], "one run folder"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_a_wrong_request_is_told_and_ends_with_2(words, told):
    done = run(*words)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_version():
    assert "commands:" in run("--help").stdout
    assert run("help").stdout == run("--help").stdout
    assert run("--version").stdout.startswith("fasttrain 0.")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops_with_75(tmp_path, number):
    process = start("--config", DIGITS, "log.every=1", f"run.dir={tmp_path}", "run.id=a")
    folder = tmp_path / "resnet-digits" / "a"
    wait_for_step(process, folder, 3)
    code, output = end(process, number)
    assert code == 75, output
    assert "Traceback" not in output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert (folder / "checkpoints" / f"step-{summary['steps']}" / "manifest.json").exists()
    assert run("status", str(folder)).returncode == 75


def test_an_error_of_the_users_code_fails_with_1_and_its_traceback(tmp_path):
    (tmp_path / "broken.py").write_text(
        "from recipes.resnet import ResNet\n"
        "class Broken(ResNet):\n"
        "    def loss(self, output, batch):\n"
        "        raise KeyError('mine')\n"
    )
    (tmp_path / "broken.yaml").write_text(
        "trainer: broken:Broken\nbatch_size: 8\nmodel: {name: resnet8}\nrun: {dir: runs, id: a}\n"
    )
    # Its module stands beside the config, and is found from another folder, too.
    assert run("validate", "--config", str(tmp_path / "broken.yaml")).returncode == 0
    done = run("--config", "broken.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr
    assert json.loads((tmp_path / "runs" / "broken" / "a" / "summary.json").read_text())["status"] == "failed"
    assert run("status", "runs/broken/a", cwd=tmp_path).returncode == 1


@pytest.mark.ranks
def test_two_ranks_show_one_display_and_write_one_folder(tmp_path):
    done = run("--config", DIGITS, *SHORT, f"run.dir={tmp_path}", ranks=2)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "resnet-digits").iterdir()
    assert json.loads((folder / "summary.json").read_text())["world_size"] == 2
    assert done.stdout.count("step 20/23") == 1
    assert done.stdout.count("start ") == 1


@pytest.mark.ranks
def test_a_wrong_request_under_a_launcher_is_told_once():
    done = run("--config", DIGITS, "precision=fp61", ranks=2)
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("did you mean") == 1
    done = run("--config", DIGITS, "data_parallel=null", ranks=2)
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("data_parallel=null with 2 ranks") == 1


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_killed_by_a_signal_leaves_no_process_behind(tmp_path, number):
    process = start("--config", DIGITS, "log.every=1", "epochs=500", f"run.dir={tmp_path}", "run.id=a", ranks=2)
    folder = tmp_path / "resnet-digits" / "a"
    wait_for_step(process, folder, 3)
    family = descendants(process.pid)
    assert len(family) >= 2
    process.send_signal(number)
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in family) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [pid for pid in family if alive(pid)]
    output = process.communicate(timeout=30)[0]
    assert left == [], output
    if number != signal.SIGKILL:
        assert json.loads((folder / "summary.json").read_text())["status"] == "stopped", output
        assert run("status", str(folder)).returncode == 75
    else:
        assert run("status", str(folder)).returncode == 1


def test_environments_of_tests_hold_no_launcher():
    assert not {"RANK", "WORLD_SIZE"} & set(environment())
