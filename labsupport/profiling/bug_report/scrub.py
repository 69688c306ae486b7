"""What must not stand in a report: home folders, names of user and machine, secrets.

`Scrubber` replaces them in any text: the user's own, in every spelling that a program may print,
and whatever looks like a token, a password or a key. It errs on the side of too much.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import shlex
import socket
import unicodedata
from collections.abc import Callable, Iterable
from urllib.parse import quote

HOME, USER, HOST, SECRET, EMAIL = "~", "<user>", "<host>", "<secret>", "<email>"

# Names that say nothing about a person or a machine, and stand in texts for other reasons.
_COMMON = {
    "root", "user", "users", "admin", "ubuntu", "debian", "runner", "jovyan", "student", "nobody",
    "vscode", "home", "work", "tmp", "localhost", "localdomain", "linux", "torch", "python",
}  # fmt: skip
_WHOLE_WORD_BELOW = 5  # a shorter name is replaced as a whole word only: "ann" is in "cannot"

# Names of secrets: words that say it wherever they stand in a name, and words that also mean other
# things here ("cache key", "backward pass"). Both are looked for in names of environment variables;
# in texts, the value after one of the second kind must look like a secret too.
# "tokens", "eos_token_id", "time per token: 12.3", "token = forward()" are of language models.
_PLAIN = (
    r"secret|passw(?:or)?d|passphrase|pwd(?!=[/~])|credential|"
    r"token(?!s|iz|_id|\s*[=:]\s*(?:[\d.]{1,8}(?![\w.-])|\w{1,40}[(\[]|tensor\b|tokenizer\.))|"
    r"(?:api|access|account|auth|session|private|signing|encryption)(?:[_-]?key|\ key\b)|"
    r":_auth|(?<=[a-z0-9][_-])(?<!ward_)pass(?![a-z])"
)
_AMBIGUOUS = r"key|pass|auth|cookie"
_ENVIRONMENT_NAMES = re.compile(f"{_PLAIN}|{_AMBIGUOUS}", re.IGNORECASE)
_NO_SECRETS = {"PWD", "OLDPWD"}  # the working directory

_IS = r"\\?[\"']?\s*[=:]\s*"  # in a file, an environment, a query, JSON, Python
_CONSTANT = r"(?:true|false|none|null)\b"
_VALUE = rf"(?!{_CONSTANT})[^\s\"',;&<>()\[\]{{}}]"
# Letters and digits in one piece: no number, no address, no dotted name, no call, no snake_case.
_RANDOM = (
    r"(?!0x)(?=[^\s\"',;]{0,80}\d)(?=[^\s\"',;]{0,80}[a-z])"
    r"[a-z0-9+/=~!@#$%^*-]{AT_LEAST,}+(?!\.?[\w(\[])"
)
_COMMIT = (  # what stands before 40 digits that are no key
    r"(?<![a-z])(?:(?:commit|git)(?:_(?:version|commit|sha|hash|id))?|revision|rev|ref|head|tree|"
    r"blob|checkout|snapshots|sha1)[^\w\r\n]{1,4}|git\+\S{1,200}@"
)

# (what, by what), in this order: a later rule must not spoil what an earlier one looks for.
# Lengths are bounded, or a long line without a space would take minutes.
_PATTERNS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), replacement)
    for pattern, replacement in (
        # Colours and cursor movements of a terminal: they would cut a word in two.
        (r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])", ""),
        (
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
            SECRET,
        ),
        # A header, to the end of its line or string.
        (
            r"((?:proxy-)?authorization|x-[\w-]{0,40}?(?:key|token)|(?:set-)?cookie)(\\?[\"']?\s*[:=]\s*)"
            r"[^\r\n]*?(?=\\?[\"'][,\s})]|[\r\n]|\Z)",
            rf"\1\2{SECRET}",
        ),
        (r"\b(bearer)\s+[a-z0-9._~+/=-]{8,}", rf"\1 {SECRET}"),
        # user:password@ in an address, and token@.
        (r"\b([a-z][a-z0-9+.-]{0,20}://)[^\s/\"'<>@]+(?:@[^\s/\"'<>@]+)*@", rf"\1{SECRET}@"),
        (r"(?<![a-z0-9])(?:hf|api_org)_[a-z0-9]{8,}", SECRET),
        (r"(?<![a-z0-9])gh[pousr]_[a-z0-9]{8,}", SECRET),
        (r"(?<![a-z0-9])github_pat_\w{8,}", SECRET),
        (r"(?<![a-z0-9])glpat-[\w-]{8,}", SECRET),
        (r"(?<![a-z0-9])sk-[\w-]{8,}", SECRET),
        (r"(?<![a-z0-9])(?:sk|pk|rk)_(?:live|test)_\w{8,}", SECRET),
        (r"(?<![a-z0-9])xox[a-z]-[\w-]{8,}", SECRET),
        (r"(?<![a-z0-9])(?:npm|nvapi|dckr_pat|r8)[_-][\w-]{16,}", SECRET),
        (r"(?<![a-z0-9])pypi-[\w-]{16,}", SECRET),
        (r"(?<![a-z0-9])wandb_v\d+_\w{16,}", SECRET),
        (r"(?<![a-z0-9])AIza[\w-]{20,}", SECRET),
        (r"(?<![a-z0-9])(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}", SECRET),
        (r"(?<![a-z0-9])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?", SECRET),
        # name = value, where the name says that the value is secret.
        (
            rf"((?:{_PLAIN})s?[\w.-]{{0,40}}{_IS}\\?)([\"'])(?:\\.|(?!\2).)+\2",
            rf"\1\2{SECRET}\2",
        ),
        (rf"((?:{_PLAIN})[\w.-]{{0,40}}{_IS}){_VALUE}{{4,}}", rf"\1{SECRET}"),
        # SERVICE_KEY=..., as variables of an environment are written.
        (
            rf"((?-i:[A-Z0-9]_(?:KEY|AUTH)){_IS})([\"'])(?:\\.|(?!\2).)+\2",
            rf"\1\2{SECRET}\2",
        ),
        (rf"((?-i:[A-Z0-9]_(?:KEY|AUTH)){_IS}){_VALUE}{{8,}}", rf"\1{SECRET}"),
        # wandb_key=..., "key": "...", --key ...
        (
            rf"((?:(?<![a-z0-9])|(?-i:(?<=[a-z])(?=[A-Z])))(?:{_AMBIGUOUS})(?:{_IS}\\?[\"']?|(?<=-key)\s+))"
            rf"{_RANDOM.replace('AT_LEAST', '12')}",
            rf"\1{SECRET}",
        ),
        (rf"((?<![a-z0-9])(?:pass|auth){_IS}){_RANDOM.replace('AT_LEAST', '6')}", rf"\1{SECRET}"),
        # Options of programs.
        (
            rf"(--?[\w-]{{0,40}}(?:{_PLAIN})\s+)(?!-)\S{{4,}}",
            rf"\1{SECRET}",
        ),
        (
            r"((?<!\S)(?:-u|--(?:proxy-)?user)[\s=]*)([\"'])[^\"':\r\n]+:[^\"'\r\n]+\2",
            rf"\1\2{SECRET}\2",
        ),
        (
            r"((?<!\S)(?:-u|--(?:proxy-)?user)[\s=]*[\"']?)(?!\d+:\d)[^\s:\"'/\\]+:[^\s\"']+",
            rf"\1{SECRET}",
        ),
        (r"(\b(?:sshpass|mysql\w*|mariadb)\b[^\r\n]{0,80}?\s-p\s*)[^\s-]\S*", rf"\1{SECRET}"),
        # Files of the kind of .netrc.
        (
            r"(\blogin\s+\S+\s+password\s+|"
            r"(?:\A|\n)[ \t]*password[ \t]+(?=\S+[ \t]*(?:\r?\n|\Z)))\S+",
            rf"\1{SECRET}",
        ),
        (r"(\bpassword\s+)(?=\S*\d)[^\s:=]{6,}", rf"\1{SECRET}"),
        # What signs an address: Amazon's, Azure's and Google's storage.
        (
            r"([?&](?:sig|signature|x-(?:amz|goog)-[\w-]{1,40}|key|code)=)[^&\s\"'<>]+",
            rf"\1{SECRET}",
        ),
        # Forty hexadecimal digits are a key, unless they are said to be a commit.
        (
            rf"({_COMMIT})?(?<![a-z0-9])[0-9a-f]{{40}}(?![a-z0-9])",
            lambda found: found[0] if found[1] else SECRET,
        ),
        (r"\b[\w.+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[a-z]{2,24}\b", EMAIL),
        # Other people's home folders; on Windows, their names may be of several words.
        (
            r"([/\\]+(?:home|Users)[/\\]+)(?!<)"
            r"(?:(?<=\\)[^/\\\r\n\"':,;)\]}]{1,64}(?=\\)|"
            r"[^/\\\s\"':,;)\]}]+(?-i:\ [A-Z][\w.-]*)*)",
            rf"\1{USER}",
        ),
    )
)


class Scrubber:
    """Replaces what is private in texts.

    Args:
        homes, users, hosts, secrets: what to replace, for tests; by default what this process knows
            about its user, its machine, and the values of environment variables whose names sound
            secret.
    """

    def __init__(
        self,
        homes: Iterable[str] | None = None,
        users: Iterable[str] | None = None,
        hosts: Iterable[str] | None = None,
        secrets: Iterable[str] | None = None,
    ) -> None:
        self._secrets = _longest_first(_secrets() if secrets is None else secrets)
        self._homes = [_path_pattern(home) for home in _longest_first(homes or _homes())]
        self._names = [
            (_name_pattern(name), replacement)
            for names, replacement in (
                (_users() if users is None else users, USER),
                (_hosts() if hosts is None else hosts, HOST),
            )
            for name in _longest_first(names)
        ]

    def scrub(self, text: str) -> str:
        """`text` without anything private."""
        for secret in self._secrets:
            for spelling in _spellings(secret):
                text = text.replace(spelling, SECRET)
        colours, *patterns = _PATTERNS
        text = colours[0].sub(colours[1], text)
        *patterns, other_homes = patterns
        for pattern, replacement in patterns:
            text = pattern.sub(replacement, text)
        for pattern in self._homes:
            text = pattern.sub(HOME, text)
        text = other_homes[0].sub(other_homes[1], text)
        for pattern, replacement in self._names:
            text = pattern.sub(replacement, text)
        return text


def _secrets() -> set[str]:
    # A short value, or a switch, would be replaced in the middle of ordinary words.
    return {
        value.strip()
        for name, value in os.environ.items()
        if _ENVIRONMENT_NAMES.search(name) and name not in _NO_SECRETS and len(value.strip()) >= 6
    }


def _homes() -> set[str]:
    found = {os.environ.get(name, "") for name in ("HOME", "USERPROFILE")}
    found |= {os.path.expanduser("~"), _account("pw_dir")}
    found |= {os.path.realpath(path) for path in found if path}
    return {path.rstrip("/\\") for path in found if len(path.rstrip("/\\")) > 1}


def _users() -> set[str]:
    names = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
    names |= {_account("pw_name"), _account("pw_gecos").partition(",")[0]}
    with contextlib.suppress(KeyError, OSError):  # a number without a name, as in some containers
        names.add(getpass.getuser())
    return {*names, *(os.path.basename(home) for home in _homes())}


def _hosts() -> set[str]:
    names = {socket.gethostname(), os.environ.get("HOSTNAME", ""), os.environ.get("HOST", "")}
    if hasattr(os, "uname"):
        names.add(os.uname().nodename)
    return names | {name.partition(".")[0] for name in names}


def _account(field: str) -> str:
    try:
        import pwd

        return getattr(pwd.getpwuid(os.getuid()), field)
    except (ImportError, KeyError):
        return ""


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted({text for text in texts if text.strip()}, key=len, reverse=True)


def _spellings(text: str) -> list[str]:
    """How programs print a text: as it is, escaped for a shell, JSON, Python or an address."""
    forms = {unicodedata.normalize(form, text) for form in ("NFC", "NFD")} | {text}
    found: set[str] = set()
    for form in forms:
        plain = quote(form)
        found |= {form, plain, plain.lower(), quote(form, safe=""), json.dumps(form)[1:-1]}
        found |= {re.sub(r"([^\w/.@%+=:,-])", r"\\\1", form), shlex.quote(form).strip("'")}
        found |= {repr(form)[1:-1], ascii(form)[1:-1]}
    return _longest_first(found)


def _path_pattern(path: str) -> re.Pattern[str]:
    # Separators may be doubled, and on Windows turned round; /home/ada is not /home/adams.
    spellings = (
        r"[/\\]+".join(re.escape(part) for part in re.split(r"/+", spelling))
        for spelling in _spellings(path)
    )
    return re.compile(rf"(?:{'|'.join(spellings)})(?![\w-])", re.IGNORECASE)


def _name_pattern(name: str) -> re.Pattern[str]:
    if name.lower() in _COMMON or len(name) < 2:
        return re.compile(r"(?!)")  # matches nothing
    spellings = "|".join(map(re.escape, _spellings(name)))
    if len(name) < _WHOLE_WORD_BELOW:
        return re.compile(rf"(?<![a-z0-9])(?:{spellings})(?![a-z0-9])", re.IGNORECASE)
    return re.compile(f"(?:{spellings})", re.IGNORECASE)
