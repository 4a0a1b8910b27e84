"""/help in each form, for models of every sort."""
import json
import re

import pytest

import settings
from engines.models import Model
from pages import help

BASE = "https://sparks.example.net"
HOSTILE = "</code><script>alert(1)</script>`'\"|\\$(id)*_[x](javascript:1)\n\r\u2028# ü\ud800```"


def configured(**variables):
    return settings.load({"SPARKS_CONFIG": "/dev/null",
                          **{"SPARKS_" + name.upper(): value for name, value in variables.items()}}, warn=pytest.fail)


def model(**fields):
    return Model(**{"id": "glm-5.3-flash", "effort": "glm", "reasoning_field": "both", "context": 850000,
                   "loaded": True, "aliases": [], "default": True} | fields)


def page(form="md", models=None, base_url=BASE, **variables):
    return help.render(configured(**variables), [model()] if models is None else models, base_url, form)[0]


def data(**arguments):
    return json.loads(page("json", **arguments))


def fences(text, language):
    return [block for name, block in re.findall(r"^```(\w+)\n(.*?)\n```$", text, re.M | re.S) if name == language]


def shown(models):
    """The default model's id as it leaves the gateway: UTF-8 has no lone surrogates."""
    return models[0].id.encode("utf-8", "replace").decode() if models else "MODEL-ID"


MODELS = [model(), model(id=HOSTILE), model(context=None, effort="none"), None]
NAMES = ["glm", "hostile", "bare", "no model"]
