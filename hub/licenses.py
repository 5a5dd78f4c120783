"""The licences that the Hub knows, for where it cannot be asked."""

from difflib import get_close_matches

from tercet.training.errors import UserError

LICENSES_PAGE = "https://huggingface.co/docs/hub/repositories-licenses"
# As of November 2026.
_KNOWN = (
    "afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0 "
    "bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 "
    "cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 "
    "cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 "
    "cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 "
    "etalab-2.0 eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 h-research "
    "intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c "
    "mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openrail openrail++ osl-3.0 other pddl postgresql unlicense wtfpl "
    "zlib"
)
_LICENSES = sorted(_KNOWN.split())


def check_known(license: str) -> None:
    """Refuse a licence that the Hub did not know when this was written.

    Raises:
        UserError: Names those that look like it.
    """
    if license in _LICENSES:
        return
    close = get_close_matches(license.lower().replace(" ", "-"), _LICENSES) or ["apache-2.0", "mit", "cc-by-4.0"]
    raise UserError(
        f"{license!r} is no licence that the Hub knows: give {', '.join(close)}, or another of {LICENSES_PAGE}"
    )
