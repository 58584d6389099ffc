"""Settings of the router process. A flag that vLLM has too carries vLLM's name.

`main` reads them once with `services.common.settings.configuration`, and they are never changed afterwards. The
descriptions are the texts of `baton router --help`, which also shows the unit if a field's name ends with it (`_s`).
Each module holds some subjects, one class for each (`common.settings.shared_settings` explains the chain of classes).
"""

from baton_serve.services.router.settings.router import ReasoningParser, RouterSettings, ToolCallParser

__all__ = ["ReasoningParser", "RouterSettings", "ToolCallParser"]
