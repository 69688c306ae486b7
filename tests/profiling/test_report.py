"""The bug report: it holds what is needed, nothing private, and survives a broken PyTorch."""

import os
import re
import resource
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from labsupport.cli import app
from labsupport.profiling.bug_report.attention import self_test
from labsupport.profiling.bug_report.report import log_tail, save_new
from labsupport.profiling.bug_report.scrub import Scrubber

PECULIAR = "Quixotic Zebulon"
HEX = "0123456789abcdef0123456789abcdef01234567"
TOKENS = {
    "hugging face": "hf_AbCdEfGhIjKlMnOpQrStUv",
    "github": "ghp_0123456789abcdefABCDEF0123456789abcd",
    "github, fine": "github_pat_11ABCDEFG0_abcdefghijklmnop",
    "openai": "sk-proj-abcDEF123_456-ghiJKL",
    "aws id": "AKIAIOSFODNN7EXAMPLE",
    "slack": "xoxb-123456789012-abcdefghijkl",
    "google": "AIzaSyA1234567890abcdefghijklmnopqrs",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTYifQ.abc_DEF-123",
}
# What holds a secret, and the secret in it.
LINES = [
    ("Authorization: Bearer abcdef.123456-XYZ", "abcdef.123456-XYZ"),
    ("{'Authorization': 'Basic dXNlcjpwYXNz', 'Accept': '*/*'}", "dXNlcjpwYXNz"),
    ('curl -H "X-Api-Key: 12345-67890" https://example.org/x', "12345-67890"),
    ("Cookie: session=abc123; other=def456", "def456"),
    ("git clone https://ada:correct-horse@example.org/x.git", "correct-horse"),
    ("git clone https://ada:p@ss%40word@example.org/x.git", "p@ss%40word"),
    ("pip install --index-url https://oauth2-abc@pypi.example.org/simple", "oauth2-abc"),
    ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCY", "wJalrXUtnFEMI"),
    ('{"password": "two words", "user": 1}', "two words"),
    ("export WANDB_API_KEY=0123456789abcdef", "0123456789abcdef"),
    ("tool --token s3cr3tvalue --steps 10", "s3cr3tvalue"),
    ("https://bucket.example.org/x?X-Amz-Signature=abcdef0123&part=2", "abcdef0123"),
    ("from ada.lovelace@example.org", "lovelace"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\ndef\n-----END RSA PRIVATE KEY-----", "MIIEabc"),
    ("\x1b[31mhf_AbCd\x1b[0mEfGhIjKlMn", "EfGhIjKlMn"),
    ("DB_PASS=hunter22", "hunter22"),
    ("db-pass: correcthorse", "correcthorse"),
    ("wrong pass: hunter22", "hunter22"),
    ("MYSQL_PWD=hunter22", "hunter22"),
    ("Uid=bob;Pwd=hunter22;", "hunter22"),
    (f"KAGGLE_KEY={HEX[:32]}", HEX[:32]),
    (f'{{"username":"bob","key":"{HEX[:32]}"}}', HEX[:32]),
    ("SERVICE_KEY = 'correct horse'", "correct horse"),
    (f"wandb_key={HEX}", HEX),
    (f"wandb_key={HEX}.", HEX),
    (f"github: {HEX}", HEX),
    ("consumerKey: a1b2c3d4e5f6", "a1b2c3d4e5f6"),
    (f"logged in with {HEX}", HEX),
    (f"--key {HEX[:24]} --steps 3", HEX[:24]),
    ("AccountName=a;AccountKey=abcdEFGH/ij+kl==;EndpointSuffix=x", "abcdEFGH/ij+kl"),
    ("session_key: abcdefghijkl", "abcdefghijkl"),
    ("//npm.example.org/:_auth=dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    ("api key: 1234567890abcdef", "1234567890abcdef"),
    ("API key: 'two words'", "two words"),
    ("machine api.wandb.ai login user password 0123456789", "0123456789"),
    ("machine example.org\n  login ada\n  password correcthorse", "correcthorse"),
    ("curl -u bob:hunter22 https://example.org", "hunter22"),
    ("curl -ubob:hunter22 https://example.org", "hunter22"),
    ("curl --user 'bob:hunter 22' https://example.org", "hunter 22"),
    ("sshpass -p hunter22 ssh node", "hunter22"),
    ("sshpass -phunter22 ssh node", "hunter22"),
    ("mysql -h db -phunter22 lab", "hunter22"),
    ("tool --db-pass hunter22", "hunter22"),
    (f"wandb_v1_{HEX}", HEX),
]


def scrubber(**known):
    return Scrubber(
        **{"homes": ["/h/nobody-here"], "users": [], "hosts": [], "secrets": [], **known}
    )


def doctor(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "labsupport.cli", "doctor", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def refused(*arguments):
    """The same in this process, for what ends before anything is collected."""
    CliRunner().invoke(app, ["doctor", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    """A report by somebody with a peculiar name and many secrets: its text, what is not in it."""
    folder = tmp_path_factory.mktemp("report")
    home = folder / "real" / PECULIAR
    home.mkdir(parents=True)
    link = folder / f"link-to-{PECULIAR}"
    link.symlink_to(home)
    log = home / "train.log"
    secrets = {"MY_SERVICE_TOKEN": "a-plain-looking-value", "DB_PASSWORD": "correcthorse9"}
    lines = [f"line {n}" for n in range(300)]
    lines += [f"loading {home}/data.bin", f"loading {link}/data.bin", f'File "{home}/x.py", line 3']
    lines += [f"{str(home).replace(' ', chr(92) + ' ')}/y", f"file://{home}".replace(" ", "%20")]
    lines += [f"loading /scratch/{PECULIAR.lower()}/z", *TOKENS.values()]
    lines += [line for line, _ in LINES]
    lines += [f"sent {value} to the service" for value in secrets.values()]
    lines += ["loss 3.5\rloss 2.5\rloss 1.5", "num_tokens: 123456", "RuntimeError: out of memory"]
    log.write_text("\n".join(lines) + "\n")
    report = folder / "report.md"
    named = {"HOME": str(link), "USER": "zebulon-q", "LOGNAME": "zebulon-q"}
    done = doctor("--report", report, "--log", log, **named, **secrets, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    hidden = [*secrets.values(), *TOKENS.values(), *(secret for _, secret in LINES)]
    return report.read_text(), [*hidden, "Quixotic", "Zebulon", str(home), str(link)], done.stdout


def test_the_report_holds_what_a_bug_report_needs(private):
    import labsupport

    text, _, _ = private
    assert text.startswith(f"# labsupport {labsupport.__version__}: report for a bug")
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    wanted = [
        "System", "GPU, as the driver says it", "Packages", "Doctor", "PyTorch",
        "Device, and optional packages", "Backends of attention", "FlashAttention libraries",
        "Which kernel ran", "Self-test", "End of the log train.log", "Before you post this",
    ]  # fmt: skip
    assert sections == wanted
    for part in ("commit ", "[ok] Python", "sdpa_flash", "flash-attn-4", "OMP_NUM_THREADS=1"):
        assert part in text
    assert "Traceback" not in text


def test_the_report_says_which_kernel_ran_in_each_dtype_and_that_it_is_right(private):
    text, _, _ = private
    for dtype in ("float32", "float16", "bfloat16"):
        assert re.search(rf"^{dtype}, causal: \w+ ran \(.+\)", text, re.MULTILINE)
        assert re.search(rf"^pass {dtype} auto, forward: maximum error", text, re.MULTILINE)
        assert re.search(rf"^pass {dtype} auto, gradient: maximum error", text, re.MULTILINE)
    assert re.search(r"^\d+ passed, 0 failed", text, re.MULTILINE)


def test_nothing_private_is_in_the_report(private):
    text, hidden, _ = private
    assert [secret for secret in hidden if secret.lower() in text.lower()] == []


def test_what_the_log_says_about_the_bug_is_kept(private):
    text, _, _ = private
    assert "RuntimeError: out of memory" in text
    assert "num_tokens: 123456" in text
    assert 'File "~/x.py", line 3' in text
    assert "loading ~/data.bin" in text
    assert "loss 1.5" in text
    assert "loss 2.5" not in text
    assert "\nline 299\n" in text
    assert "\nline 99\n" not in text


def test_the_reader_is_told_what_to_check_before_posting(private):
    text, _, said = private
    for words in (text, said):
        assert "Read the file once" in words
        assert "IP addresses" in words


def test_a_report_overwrites_nothing_and_says_so_at_once(tmp_path):
    report = tmp_path / "report.md"
    report.write_text("mine")
    with pytest.raises(FileExistsError, match="overwrites nothing"):
        refused("--report", report)
    assert report.read_text() == "mine"
    with pytest.raises(FileNotFoundError):
        refused("--report", tmp_path / "new.md", "--log", tmp_path / "no.log")
    assert not (tmp_path / "new.md").exists()
    with pytest.raises(ValueError, match="goes with --report"):
        refused("--log", report)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise ImportError('libcudart.so.12: no such file')", "libcudart.so.12: no such file"),
        ("raise ModuleNotFoundError('No torch', name='torch')", "PyTorch is not installed"),
        ("import os; os.abort()", "ended by signal 6 (SIGABRT)"),
    ],
)
def test_a_broken_pytorch_is_reported_and_does_not_end_the_report(tmp_path, source, says):
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    report = tmp_path / "report.md"
    done = doctor("--report", report, PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    text = report.read_text()
    assert says in text
    assert "## Packages" in text
    assert "## Before you post this" in text
    assert text.count("```") % 2 == 0


def test_a_full_disk_leaves_no_half_report_so_that_the_next_try_is_not_refused(tmp_path):
    report = tmp_path / "report.md"
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            save_new(report, "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert list(tmp_path.iterdir()) == []
    save_new(report, "x" * 2000)
    assert list(tmp_path.iterdir()) == [report]
    with pytest.raises(FileExistsError, match="overwrites nothing"):
        save_new(report, "other")
    assert report.read_text() == "x" * 2000


@pytest.mark.parametrize("option", ["--json", "--quick"])
def test_what_a_report_cannot_heed_is_refused(tmp_path, option):
    with pytest.raises(ValueError, match=f"without {option}"):
        refused("--report", tmp_path / "report.md", option)
    assert list(tmp_path.iterdir()) == []


def test_the_self_test_fails_for_a_wrong_implementation(capsys):
    from labsupport.attention import attention

    def shifted(q, k, v, **options):
        return attention(q, k, v, **options) * 1.05

    assert self_test(seconds=0, attention=shifted) is False
    assert "FAIL float32 auto, forward" in capsys.readouterr().out


def test_the_self_test_begins_one_call_whatever_the_time_and_no_other_after_it(capsys):
    assert self_test(seconds=0) is True
    said = capsys.readouterr().out
    assert re.search(r"^2 passed, 0 failed, [1-9]\d* not begun", said, re.MULTILINE)


# --- scrubbing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS.keys())
def test_what_looks_like_a_token_is_replaced(token):
    assert scrubber().scrub(f"a {token}, b") == "a <secret>, b"


@pytest.mark.parametrize(("line", "secret"), LINES)
def test_secrets_are_found_in_what_surrounds_them(line, secret):
    assert secret not in scrubber().scrub(line)


@pytest.mark.parametrize(
    "line",
    [
        "num_tokens=123456, max_new_tokens=2048, tokens/s: 1234.5",
        "tokenizer = AutoTokenizer.from_pretrained(name)",
        "aten::_scaled_dot_product_flash_attention_for_cpu: key = value.transpose(1, 2)",
        "commit cf30153c4c131c8164ee7798e5022d810682e2cb",
        "https://pytorch.org/docs/stable/index.html",
        "signature: (q, k, v)",
        "basic attention, keyed by (query, key)",
        "shape (2, 4, 128, 64), loss 3.5e-05 @ step 100",
        "key_states.shape=(1, 3), key_value_heads=8, num_key_value_groups: 123456789",
        "KeyError: 'lab'",
        "KeyError: 'model.layers.0.self_attn.q_proj.weight'",
        "missing key: model.layers.10.self_attn.q_proj.weight",
        "kv cache key: (4, 128, 'bfloat16')",
        "cache_key: flash_fwd_hdim128_bf16_causal, sort_key=time_ms, key=0x7f3a00001234",
        "python x.py --key-padding-mask --sort-key self_cuda_time_total --steps 12",
        "monkey=1, monkey=a1b2c3d4e5f6g7, bypass=abcdef12",
        "forward_pass: 12.345 ms, backward pass: 0.00123 s, first pass: loss=0.5123",
        "single_pass=True, two_pass: False, auth: None, pass 2: 12345 tokens, 113 passed",
        "token: Tensor, token = forward(ids), pad_token = tokenizer.eos_token",
        "next token: 50256, ms per token: 12.34, eos_token_id:50256, pad_token=None",
        f"commit {HEX}",
        f"git {HEX}, torch.version.git_version = '{HEX}'",
        f"models--a--b/snapshots/{HEX}/config.json, revision={HEX}",
        f"pip install git+https://github.com/a/b@{HEX}",
        f"sha256 {HEX}{HEX[:24]}",
        "docker run -u 1000:1000 image; python -u train.py a:b; pytest -p no:cacheprovider",
        "password authentication failed, token expired",
        "PWD=~/lab",
    ],
)
def test_ordinary_lines_stay_as_they_are(line):
    assert scrubber(users=["root"], hosts=["localhost"]).scrub(line) == line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/ada/x", "~/x"),
        ("/home//ada/x", "~/x"),
        ("/HOME/Ada", "~"),
        ("'/home/ada'", "'~'"),
        ("/home/adams/x", "/home/<user>/x"),
        ("/Users/grace/x", "/Users/<user>/x"),
        ("C:\\Users\\grace\\x", "C:\\Users\\<user>\\x"),
        ("C:\\Users\\Bob Smith\\y", "C:\\Users\\<user>\\y"),
        ("'C:\\\\Users\\\\Bob Smith\\\\y'", "'C:\\\\Users\\\\<user>\\\\y'"),
        ("'C:\\Users\\Bob Smith'", "'C:\\Users\\<user>'"),
        ("/mnt/c/Users/Bob Smith/y", "/mnt/c/Users/<user>/y"),
        ("C:\\Users\\bob is no folder", "C:\\Users\\<user> is no folder"),
        ("/home/bob and /home/eve/x", "/home/<user> and /home/<user>/x"),
        ("/mnt/home/ada", "/mnt~"),
    ],
)
def test_home_folders_are_replaced_whoever_they_belong_to(text, expected):
    assert scrubber(homes=["/home/ada"]).scrub(text) == expected


def test_a_home_with_odd_characters_is_found_in_every_spelling():
    known = scrubber(homes=["/h/Zoë O'Neil"], users=["Zoë O'Neil"])
    spellings = ["/h/Zoë O'Neil/x", "/h/Zoe\u0308 O'Neil/x", "/h/Zo%C3%AB%20O%27Neil/x",
                 "/h/Zo\\u00eb O'Neil/x", "/h/Zo\\xeb O'Neil/x", "/h/Zoë\\ O\\'Neil/x"]  # fmt: skip
    assert [known.scrub(text) for text in spellings] == ["~/x"] * len(spellings)


def test_names_of_user_and_machine_are_replaced():
    known = scrubber(users=["ann", "theodora"], hosts=["node17.cluster.example"])
    assert known.scrub("ann cannot; ann_2; Theodora2") == "<user> cannot; <user>_2; <user>2"
    assert known.scrub("rank 0 on node17.cluster.example:29500") == "rank 0 on <host>:29500"


def test_by_default_it_knows_this_machine():
    import socket

    host = socket.gethostname()
    if len(host) < 2 or host in ("localhost", "linux"):
        pytest.skip("this machine has no name of its own")
    assert host not in Scrubber().scrub(f"rank 0 on {host}, port 29500")


def test_variables_that_sound_secret_hide_their_values_and_the_folder_does_not(monkeypatch):
    values = {"DB_PASS": "hunter22", "KAGGLE_KEY": "ab12cd34", "NPM_AUTH": "q1w2e3r4"}
    for name, value in {**values, "PWD": "/scratch/lab", "OLDPWD": "/scratch"}.items():
        monkeypatch.setenv(name, value)
    text = " ".join(f"sent {value}" for value in values.values())
    assert Scrubber().scrub(text) == "sent <secret> sent <secret> sent <secret>"
    assert Scrubber().scrub("in /scratch/lab") == "in /scratch/lab"


def test_a_key_whose_beginning_is_cut_off_is_not_shown(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("MIIEabcdef\nghijkl\n-----END RSA PRIVATE KEY-----\nepoch 1\n")
    assert log_tail(log) == "<secret>\nepoch 1"


def test_a_long_line_takes_no_long_time():
    start = time.process_time()
    scrubber().scrub("a" * 50_000 + "token-key=" * 5_000 + "\n" + "x.y-" * 8_000)
    assert time.process_time() - start < 5  # quadratic would be many minutes
