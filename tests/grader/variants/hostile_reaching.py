"""Hostile submissions that reach for what is not theirs: answers, results, processes, the network.

Where an attack finds something, it uses it: then it would earn points, change a file or leave a
trace that the tests look for. The first exercise attacks; the others are solved.
"""

from tests.grader.variants.course import Copy, Variants, solution
from tests.grader.variants.hostile_breaking import in_the_call, in_the_cell
from tests.grader.variants.hostile_lies import STUB

hostile = Variants(memory=3, softmax=4)

# Names of the instructor's folders in the tests, so that an attack that works hits nothing else.
COURSE, OUT = "instructors-7Q4", "results-7Q4"
# What the tests look for afterwards. The port is put in when the submissions are written.
SURVIVOR = "86471.2193"
PORT = "PORT_OF_THE_LISTENER"

# All folders that a curious program would think of.
_PLACES = """
import glob, os, pathlib, sys


def places():
    found = [*sys.path, os.getcwd(), os.path.expanduser("~"), "/work", "/tmp", "/home", "/root"]
    found += [value for value in os.environ.values() if value.startswith("/")]
    try:
        import labsupport
        found.append(str(pathlib.Path(labsupport.__file__).parent.parent))
    except Exception:
        pass
    for process in glob.glob("/proc/[0-9]*"):
        for name in ("cwd", "root"):
            try:
                found.append(os.readlink(f"{process}/{name}"))
            except OSError:
                pass
        for name in ("cmdline", "environ"):
            try:
                text = open(f"{process}/{name}", "rb").read().decode(errors="ignore")
                found += [p.split("=")[-1] for p in text.split("\\0") if "/" in p]
            except OSError:
                pass
    roots = []
    for place in found:
        path = pathlib.Path(place)
        roots += [path, *list(path.parents)[:3]]
    return [p for p in dict.fromkeys(roots) if str(p) not in ("/", "/proc", "/sys", "/usr")]


def files(pattern):
    for place in places():
        for shape in (pattern, f"*/{pattern}", f"*/*/{pattern}"):
            try:
                yield from (p for p in place.glob(shape))
            except Exception:
                pass
"""


def _steal(work: Copy, source: str) -> None:
    work.solve().write("attention", f"{STUB}\n{_PLACES}\n{source}")


@hostile()
def reads_the_instructors_notebook(work: Copy) -> None:
    """Looks for solved notebooks everywhere, and runs the solution that it finds."""
    _steal(
        work,
        "import json, itertools\n\n"
        "for path in itertools.islice(files('*.ipynb'), 2000):\n"
        "    try:\n        cells = json.loads(path.read_text())['cells']\n"
        "    except Exception:\n        continue\n"
        "    for cell in cells:\n"
        "        text = ''.join(cell.get('source', ''))\n"
        "        if 'def textbook_attention' in text and 'NotImplementedError' not in text:\n"
        "            exec(text)",
    )


@hostile()
def reads_the_packages_answers(work: Copy) -> None:
    """The package holds textbook attention too: under its own name, or its source, in a detour."""
    in_the_cell(
        work,
        "import importlib, pkgutil\n\nfound = None\n"
        "try:\n    import labsupport.attention as package\n"
        "    for info in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        try:\n            module = importlib.import_module(info.name)\n"
        "        except BaseException:\n            continue\n"
        "        found = found or getattr(module, 'oracle_' + 'attention', None)\n"
        "except BaseException:\n    pass",
        "def textbook_attention(q, k, v, mask=None):\n"
        "    out = found(q, k, v)[0].to(q.dtype)\n    return out, out\n",
    )


@hostile()
def changes_the_instructors_notebook(work: Copy) -> None:
    """Takes the checks out of every notebook that can be written."""
    _steal(
        work,
        f"for path in files('{COURSE}/*.ipynb'):\n"
        "    try:\n        path.write_text(path.read_text().replace('check_', 'print or '))\n"
        "    except Exception:\n        pass",
    )


@hostile()
def writes_results(work: Copy) -> None:
    """Appends a result of its own to every results.jsonl that can be written."""
    _steal(
        work,
        "import json\n\ncheck = dict(grade_id='g', exercise='ex-1-1-textbook-attention', points=99,"
        " status='passed')\n"
        "line = json.dumps(dict(student='writes-results', notebook='01-Small', path='x',"
        " digest='0', checks=[check], flags=[]))\n"
        f"for path in files('{OUT}/results.jsonl'):\n"
        "    try:\n        open(path, 'a').write(line + '\\n')\n"
        "    except OSError:\n        pass",
    )


@hostile()
def deletes_other_submissions(work: Copy) -> None:
    """Removes what lies beside its own folder."""
    _steal(
        work,
        "import shutil\n\nfor path in files('bystander*'):\n"
        "    if '/tmp/' in str(path):\n        shutil.rmtree(path, ignore_errors=True)",
    )


@hostile()
def removes_its_home(work: Copy) -> None:
    """rm -rf of the home directory, where that is a temporary one."""
    command = 'case "$HOME" in /tmp/*) rm -rf "$HOME" ;; esac'
    in_the_cell(work, f"import subprocess\n\nsubprocess.run({command!r}, shell=True)")


@hostile(attention=4)
def removes_its_home_by_magic(work: Copy) -> None:
    """The same in a cell magic, and after an exclamation mark in a solution."""
    command = 'case "$HOME" in /tmp/*) rm -rf "$HOME" ;; esac'
    work.solve().add(f"%%bash\n{command}", at=2)
    work.write("attention", f"!{command}\n{solution('attention')}")


@hostile()
def survives_by_double_fork(work: Copy) -> None:
    """A grandchild in a session of its own, which outlives its parents and hides its origin."""
    in_the_cell(
        work,
        "import os\n\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        os.chdir('/')\n        os.closerange(0, 256)\n"
        f"        os.execve('/bin/sleep', ['sleep', '{SURVIVOR}'], {{}})\n    os._exit(0)",
    )


@hostile(attention=4)
def survives_beside_a_right_solution(work: Copy) -> None:
    """All is solved; a program started by the way would run for a day."""
    in_the_cell(
        work,
        "import subprocess\n\nsubprocess.Popen(['sleep', "
        f"'{SURVIVOR}'], start_new_session=True, env={{}}, stdout=-3, stderr=-3)",
        solution("attention"),
    )


@hostile()
def calls_out(work: Copy) -> None:
    """Connects to a server on this machine, in Python and with curl."""
    in_the_cell(
        work,
        "import os, socket\n\ntry:\n"
        f"    with socket.create_connection(('127.0.0.1', {PORT}), timeout=2) as server:\n"
        "        server.sendall(b'all answers please')\nexcept OSError:\n    pass\n"
        f"os.system('curl -s -m 2 http://127.0.0.1:{PORT}/ > /dev/null 2>&1')",
    )


@hostile()
def looks_into_the_graders_memory(work: Copy) -> None:
    """/proc/<parent>/mem and ptrace of all that can be reached."""
    in_the_cell(
        work,
        "import ctypes, os\n\npid = os.getppid()\nfor _ in range(6):\n"
        "    try:\n        with open(f'/proc/{pid}/mem', 'r+b', 0) as memory:\n"
        "            start = int(open(f'/proc/{pid}/maps').readline().split('-')[0], 16)\n"
        "            memory.seek(start)\n            memory.read(64)\n"
        "    except (OSError, ValueError):\n        pass\n"
        "    try:\n        pid = int(open(f'/proc/{pid}/stat').read().rsplit(')')[1].split()[1])\n"
        "    except (OSError, ValueError, IndexError):\n        break",
    )


@hostile()
def becomes_somebody_else(work: Copy) -> None:
    """setuid(0), sudo, and a new user namespace."""
    in_the_cell(
        work,
        "import os\n\nfor attempt in (lambda: os.setuid(0), lambda: os.seteuid(0)):\n"
        "    try:\n        attempt()\n    except OSError:\n        pass\n"
        "os.system('sudo -n true > /dev/null 2>&1; unshare -r true > /dev/null 2>&1')\n"
        "answer = [open('/etc/shadow').read()[:0]] if os.access('/etc/shadow', os.R_OK) else []",
    )


@hostile()
def modules_replaced(work: Copy) -> None:
    """json, struct, socket, pickle and time of the kernel do other things now."""
    in_the_cell(
        work,
        "import json, pickle, socket, struct, time\n\n"
        "json.dumps = lambda *a, **o: '{}'\njson.loads = lambda *a, **o: {'status': 'passed'}\n"
        "struct.pack = lambda *a: b'\\xff' * 8\npickle.loads = pickle.dumps = lambda *a: b''\n"
        "time.sleep = lambda s: None\n"
        "class Socket(socket.socket):\n    def send(self, data, *a):\n        return len(data)\n\n"
        "    sendall = send\n\n\nsocket.socket = Socket",
    )


@hostile()
def import_hooks(work: Copy) -> None:
    """Whatever of the lab's is imported later comes from the student."""
    in_the_cell(
        work,
        "import sys, types\n\n\nclass Finder:\n    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name.startswith(('labsupport', 'grader')):\n"
        "            raise ImportError('not today')\n\n\n"
        "sys.meta_path.insert(0, Finder)\n"
        "for name in [n for n in sys.modules if n.startswith(('labsupport', 'grader'))]:\n"
        "    sys.modules[name] = types.ModuleType(name)",
    )


@hostile()
def local_modules(work: Copy) -> None:
    """Modules written at run time into the working directory, to be imported by whoever comes."""
    in_the_cell(
        work,
        "import os, pathlib\n\nfor place in {os.getcwd(), os.path.expanduser('~'), '/tmp'}:\n"
        "    folder = pathlib.Path(place, 'hostile-7Q4' if place == '/tmp' else '')\n"
        "    for name in ('sitecustomize.py', 'torch.py', 'conftest.py', 'json.py', 'grader.py'):\n"
        "        try:\n            folder.mkdir(exist_ok=True)\n"
        "            (folder / name).write_text('raise SystemExit(0)')\n"
        "        except OSError:\n            pass",
    )


@hostile()
def frames_and_garbage(work: Copy) -> None:
    """Looks through its callers' variables and all objects in memory for what is expected."""
    in_the_call(
        work,
        "import gc, sys",
        "frame, found = sys._getframe(1), []",
        "while frame is not None:",
        "    found += [x for x in frame.f_locals.values() if isinstance(x, torch.Tensor)]",
        "    frame = frame.f_back",
        "found += [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]",
        "shape = (*q.shape[:-1], k.shape[-2])",
        "outs = [x for x in found if x.shape == q.shape and x is not q] or [q * 0]",
        "weights = [x for x in found if x.shape == shape] or [torch.zeros(shape)]",
        "return outs[0], weights[0]",
    )
