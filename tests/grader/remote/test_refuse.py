"""Ways to call PyTorch's fused attention, however spelt: all are refused."""

import pytest
import torch
import torch.nn.functional as F

from grader.remote.refuse import FusedAttentionRefused, refuse

# Each gives the function `f(q, k, v)`; D is the operator's name, which no text holds as a whole.
D = "scaled_dot_" + "product_attention"
WAYS = {
    "itself": "f = F.scaled_dot_product_attention",
    "getattr": "g = getattr\nf = g(F, D)",
    "match": "match F:\n    case object(scaled_dot_product_attention=f): pass",
    "timeit": "import timeit\nbox = []\ndef f(*x):\n"
    "    timeit.timeit('box.append(F.' + D + '(*x))', number=1, globals=globals() | {'x': x})\n"
    "    return box[-1]",
    "pickle": "import io, pandas as pd, pickle\n"
    "f = pd.read_pickle(io.BytesIO(b'ctorch.nn.functional\\n' + D.encode() + b'\\n.'))",
    "pydoc": "import pydoc\nf = pydoc.locate('torch.nn.functional.' + D)",
    "format": "import string\nf = string.Formatter().get_field('0.' + D, [F], {})[0]",
    "pandas": "import pandas as pd\nf = pd.eval('F.' + D, resolvers=[{'F': F}])",
    "type hints": "import typing\nclass A: pass\nA.__annotations__ = {'x': 'F.' + D}\n"
    "f = typing.get_type_hints(A, globals())['x']",
    "marshal": "import marshal\ncode = marshal.dumps(compile('F.' + D, '', 'eval'))\n"
    "f = eval(marshal.loads(code))",
    "logging": "import logging.config\n"
    "f = logging.config.BaseConfigurator({}).resolve('torch.nn.functional.' + D)",
    "reduce": "from functools import reduce\nf = reduce(getattr, ['nn', 'functional', D], torch)",
    "ops": "f = lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu("
    "q, k, v)[0]",
    "the textbook's operator": "f = lambda *x: torch.ops.aten._scaled_dot_product_attention_math("
    "*x)[0]",
    "its parts": "f = torch.ops.aten._scaled_dot_product_attention_math.default.decompose",
    "a script": "f = torch.jit.trace(F.scaled_dot_product_attention, (q, k, v))",
    "autocast": "f = torch.autocast('cpu')(F.scaled_dot_product_attention)",
    "no gradients": "f = torch.inference_mode()(F.scaled_dot_product_attention)",
    "a thread": "from concurrent.futures import ThreadPoolExecutor\n"
    "f = lambda *x: ThreadPoolExecutor(1).submit(F.scaled_dot_product_attention, *x).result()",
    "vmap": "f = torch.vmap(F.scaled_dot_product_attention)",
    "vjp": "f = lambda *x: torch.func.vjp(F.scaled_dot_product_attention, *x)[0]",
    "functionalize": "f = torch.func.functionalize(F.scaled_dot_product_attention)",
    "a nested tensor": "def f(*x):\n    return F.scaled_dot_product_attention("
    "*(torch.nested.nested_tensor([one[0], one[1]]) for one in x))",
    "a jagged tensor": "def f(*x):\n    return F.scaled_dot_product_attention(*(torch.nested."
    "nested_tensor([one[0], one[1]], layout=torch.jagged).transpose(1, 2) for one in x))",
    "a module": "m = torch.nn.MultiheadAttention(4, 2).eval()\n"
    "f = lambda q, k, v: m(q[0], k[0], v[0], need_weights=False)[0]",
    "an encoder": "m = torch.nn.TransformerEncoderLayer(4, 2, batch_first=True).eval()\n"
    "f = torch.no_grad()(lambda q, k, v: m(q[0]))",
    "flex": "from torch.nn.attention.flex_attention import flex_attention as f",
    "onnx": "import torch.onnx.ops\nf = torch.onnx.ops.attention",
    "onnx, late": "def f(q, k, v):\n    import importlib\n"
    "    return importlib.import_module('torch.onnx' + '.ops').attention(q, k, v)",
    "onnx rotary": "import torch.onnx.ops\n"
    "f = lambda q, k, v: torch.onnx.ops.rotary_embedding(q, k[0, 0, :, :2], v[0, 0, :, :2])",
}


@pytest.mark.parametrize("way", WAYS)
def test_attention_is_refused_and_allowed_again(way, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    q, k, v = torch.randn(3, 2, 2, 5, 4)
    names = {"torch": torch, "F": F, "D": D, "q": q, "k": k, "v": v}
    exec(WAYS[way], names)
    allow = refuse()
    try:
        with pytest.raises((FusedAttentionRefused, ImportError, RuntimeError)) as caught:
            names["f"](q, k, v)
    finally:
        allow()
    assert "asks to write" in str(caught.value) or isinstance(caught.value, ImportError)
    assert F.scaled_dot_product_attention(q, k, v).shape == q.shape
