"""What ``pipetrain launch`` refuses before anything starts."""

from __future__ import annotations

import pytest

from pipetrain.cli.main import main


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The folder has a script, ``train.py``, and no scheduler has set a variable."""
    for name in ("TF_CONFIG", "SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit(77)\n")
    (tmp_path / "folder").mkdir()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--local 2 nowhere.py", "There is no such script. Received: 'nowhere.py'. Try"),
        ("--local 2 folder", "This script is a folder. Received: 'folder'. Try"),
        ("--local 2 -m train.py", "-m takes a module's name. Received: -m 'train.py'. Try"),
        ("--local 2 -m ./train", "-m takes a module's name. Received: -m './train'. Try"),
        ("--local 0 train.py", "argument --local: '0' is not a number from 1 up"),
        ("train.py --local 2", "Try --local 2, or --hosts a,b, before the script's name."),
        ("--hosts a,b --plain train.py", "every host starts its own process"),
        ("--hosts a,b,a train.py", "Received: --hosts with a twice. Try each host once"),
        ("--hosts [fd00::1],fd00::1 train.py", "Received: --hosts with fd00::1 twice. Try each host once"),
        ("--hosts a,,b train.py", "one is empty. Received: --hosts 'a,,b'. Try"),
        ("--hosts= train.py", "one is empty. Received: --hosts ''. Try"),
        ("--hosts a[3-1] train.py", "3-1 counts down. Received: --hosts 'a[3-1]'. Try"),
        ("--hosts a:22 train.py", "a:22 has a port. Received: --hosts with a:22. Try --ssh 'ssh -p 2200'"),
        ("--hosts [::1]:22 train.py", "[::1]:22 has a port. Received: --hosts with [::1]:22. Try --ssh"),
        ("--hosts a --ssh nosuch train.py", "There is no such program. Received: --ssh nosuch. Try"),
        ("--hosts a --ssh '/x train.py", "is no command: no closing quotation"),
        ("--hosts a --python= train.py", "argument --python: '' is no command"),
        ("--local 2 --port 3000 train.py", "Received: --port, --local 2. Try leaving it out."),
        ("--local 2 --plain --ssh ssh train.py", "Received: --ssh and --plain, --local 2. Try leaving it out."),
        ("--hosts a,b --port 3000 --job x train.py", "Received: --port and --job, --hosts a,b. Try leaving it out."),
        ("--hosts a --plain --port 0 train.py", "argument --port: 0 is a port that the other processes would not know"),
    ],
)
def test_what_cannot_be_launched_is_told_at_once(arguments, said, script, capfd):
    try:
        status = main(["launch", *arguments.split(" ")])
    except SystemExit as error:  # argparse's
        status = error.code
    assert status == 2 and said in " ".join(capfd.readouterr().err.split())
