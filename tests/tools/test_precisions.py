"""The picture of the products and their precisions is what the recipes are."""

from sagebwd.recipe import PRODUCTS, RECIPES, SIXTEEN_BIT
from tools import precisions


def test_the_committed_picture_is_current():
    assert precisions.PICTURE.read_text(encoding="utf-8") == precisions.drawn(), "run `python -m tools.precisions`"


def test_every_product_and_recipe_is_drawn():
    drawn = [kind for kind, _ in precisions.STEPS if kind in PRODUCTS]
    assert sorted(drawn) == sorted([*PRODUCTS, "s"])
    assert set(precisions.NAMES) == set(RECIPES)
    for name in precisions.NAMES:
        for product in PRODUCTS:
            in_sixteen = getattr(RECIPES[name], product) == SIXTEEN_BIT
            assert (precisions.groups(RECIPES[name], product) == "") is in_sixteen
