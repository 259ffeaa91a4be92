import itertools

import pytest

from sagebwd.recipe import _CHOICES, PRODUCTS, RECIPES, Recipe


def test_named_recipes_are_the_specification():
    paper, token, full = (Recipe.named(name) for name in ("paper", "token", "full"))
    for recipe in (paper, token):
        assert [getattr(recipe, product) for product in PRODUCTS] == ["int8", "int8", "int8", "16bit", "int8", "int8"]
        assert recipe.smooth_k
    assert (paper.block_q, paper.block_k) == (128, 64)
    assert {paper.q_scale, paper.k_scale, paper.v_scale} == {"block"}
    assert {paper.p_scale_dv, paper.ds_scale_dq, paper.ds_scale_dk} == {"tile"}
    assert not paper.smooth_v
    assert (token.q_scale, token.k_scale, token.v_scale) == ("token", "token", "channel")
    assert {Recipe.named(name).v_scale for name in ("mixed",)} == {"sequence"}
    assert Recipe() == token
    assert (token.p_scale_dv, token.ds_scale_dq, token.ds_scale_dk) == ("key", "query", "key")
    assert token.smooth_v
    assert (token.block_q, token.block_k, token.p_levels, paper.p_levels) == (64, 128, 254, 127)
    assert (token.first_keys, paper.first_keys, Recipe.named("mixed").first_keys) == (16, 0, 16)
    assert {getattr(full, product) for product in PRODUCTS} == {"16bit"}
    assert {full.smooth_k, full.smooth_v} == {False}


@pytest.mark.parametrize("name", RECIPES)
def test_named_recipe_prints_as_its_name(name):
    assert str(Recipe.named(name)) == name


def test_every_single_change_of_every_recipe_reads_back():
    changes = [
        *((field, value) for field, values in _CHOICES.items() for value in values),
        *itertools.product(("block_q", "block_k"), (16, 32, 64, 128, 256)),
        *itertools.product(("p_levels",), (127, 254)),
        *itertools.product(("first_keys",), (0, 1, 16, 128)),
        *itertools.product(("smooth_k", "smooth_v"), (True, False)),
    ]
    for name, (field, value) in itertools.product(RECIPES, changes):
        recipe = Recipe.named(name).replace(**{field: value})
        assert Recipe.parse(str(recipe)) == recipe
        assert "\n" not in str(recipe)


def test_text_form_is_stable():
    assert str(Recipe.named("token").replace(smooth_v=False)) == "token(smooth_v=False)"
    assert str(Recipe.parse("paper( block_q = 64,smooth_v=True )")) == "paper(block_q=64, smooth_v=True)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens", "none called 'tokens'"),
        ("token(smooth=False)", "no field 'smooth'"),
        ("token(smooth_v)", "expected field=value"),
        ("token(smooth_v=)", "expected field=value"),
        ("token(", "cannot read"),
        ("token(s=int4)", "s='int4' is not supported; accepted: int8, 16bit"),
        ("token(block_q=48)", "block_q=48"),
        ("token(block_q=True)", "block_q"),
        ("token(first_keys=129)", "first_keys=129 is not supported; accepted: 0 to 128"),
        ("token(first_keys=True)", "first_keys=True is not supported"),
        ("token(first_keys=int8)", "first_keys='int8' is not supported"),
        ("token(first_key=int8)", "no field 'first_key'; fields: .*first_keys"),
        ("token(p_levels=255)", "p_levels=255 is not supported; accepted: 127, 254"),
    ],
)
def test_bad_text_raises(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Recipe.parse(text)


@pytest.mark.parametrize("text", [" auto", "auto\n"])
def test_auto_with_blanks_is_told_so(text):
    """Regression: that "auto" fixes no numbers, where it may be given."""
    with pytest.raises(ValueError, match="has blanks; write 'auto'"):
        Recipe.parse_or_auto(text)


def test_bad_values_raise_at_construction():
    with pytest.raises(ValueError, match="q_scale='row'"):
        Recipe(q_scale="row")
    with pytest.raises(TypeError, match="smooth_k=1"):
        Recipe(smooth_k=1)
    with pytest.raises(ValueError, match="no field 'block'"):
        Recipe.named("token").replace(block=64)
    with pytest.raises(TypeError, match="expected a name or a Recipe"):
        Recipe.parse(3)


def test_recipe_is_frozen_and_hashable():
    recipe = Recipe.named("token")
    with pytest.raises(AttributeError):
        recipe.block_q = 128
    assert len({recipe, Recipe(), Recipe.named("paper")}) == 2
