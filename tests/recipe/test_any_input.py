"""Tests that whatever the text and the overrides, a recipe or RecipeErrors come of them, never another exception."""

from __future__ import annotations

from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.recipe.diagnostics import RecipeErrors
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.recipe.rules import known_keys

from .conftest import VALID

ANY = examples(120, share_fixtures=True)

_values = st.one_of(
    st.sampled_from(["auto", "null", "[]", "{}", "-1", "1e400", "0x_", "0b", "1:99", ".nan", "~", "???", "${seed}", "''"]),
    st.sampled_from(["&a 1", "*a", "[1, {a: 2}]", "{a: [", "!!int x", "| \n  x", "2020-01-01", "<<", "${oc.env:NO}", "%"]),
    st.text(max_size=12), st.integers().map(str), st.floats().map(str),
)  # fmt: skip
_keys = st.one_of(st.sampled_from(known_keys()), st.text(max_size=8))


def _nested(key: str, value: str) -> str:
    parts = key.split(".")
    return "".join(
        f"{'  ' * depth}{part}:{' ' + value if depth == len(parts) - 1 else ''}\n" for depth, part in enumerate(parts)
    )


def _try(path, overrides=()):
    try:
        load_recipe(path, overrides)
    except RecipeErrors as error:
        error.message.encode()
        [diagnostic.as_dict() for diagnostic in error.diagnostics]


@ANY
@given(pairs=st.lists(st.tuples(_keys, _values), max_size=4))
def test_any_keys_and_values_in_the_file(tmp_path, pairs):
    path = tmp_path / "recipe.yaml"
    path.write_bytes((VALID + "".join(_nested(key, value) for key, value in pairs)).encode("utf-8", "surrogatepass"))
    _try(path)


@ANY
@given(raw=st.binary(max_size=80))
def test_any_bytes(tmp_path, raw):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(raw)
    _try(path)


@ANY
@given(text=st.text(alphabet="ab:-[]{}&*!|>'\"%@`#,?.\\ \n\t$0_~<=", max_size=40))
def test_any_yaml_punctuation(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    _try(path)


@ANY
@given(overrides=st.lists(st.one_of(st.text(max_size=20), st.builds(lambda k, v: f"{k}={v}", _keys, _values)), max_size=4))
def test_any_overrides(tmp_path, overrides):
    path = tmp_path / "recipe.yaml"
    path.write_text(VALID)
    _try(path, overrides)
