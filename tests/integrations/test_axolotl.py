"""The plugin that docs/integrations/trainers.md gives, against stand-ins for Axolotl, which pins other versions."""

import re
import sys
from pathlib import Path
from types import ModuleType

import yaml
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from sagebwd.integrations import transformers as integration

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "trainers.md"


class BasePlugin:
    def register(self, cfg):
        raise AssertionError("the plugin has its own")


def test_the_plugin_makes_the_name_known_to_axolotl_and_to_transformers(monkeypatch):
    """As in Axolotl 0.19.0: a plugin is registered before the config is checked, and the name goes to Transformers."""
    names = ("axolotl", "axolotl.integrations", "axolotl.integrations.base", "axolotl.utils", "axolotl.utils.schemas")
    modules = {name: ModuleType(name) for name in (*names, "axolotl.utils.schemas.config")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    modules["axolotl.integrations.base"].BasePlugin = BasePlugin
    config = modules["axolotl.utils.schemas.config"]
    config.CANONICAL_ATTN_IMPLS = frozenset({"eager", "sdpa"})
    config.ATTN_IMPLS_SUPPORTING_PACKING = frozenset({"flash_attention_2"})

    text = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"```text\n(class SageBwdPlugin.*?)```", text, re.DOTALL)
    (settings,) = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    known = {"axolotl": modules["axolotl"]}
    exec(code, known)
    known[settings["plugins"][0].rpartition(".")[2]]().register({})

    chosen = settings["attn_implementation"]
    accepted, packing = config.CANONICAL_ATTN_IMPLS, config.ATTN_IMPLS_SUPPORTING_PACKING
    assert accepted == {"eager", "sdpa", chosen}
    assert packing == {"flash_attention_2", chosen}
    assert AttentionInterface()[chosen] is integration.attention
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM._from_config(LlamaConfig(**sizes, num_attention_heads=2), attn_implementation=chosen)
    assert model.config._attn_implementation == "sagebwd"
