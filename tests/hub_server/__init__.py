"""A Hub on loopback: the part of the Hugging Face Hub's HTTP API that huggingface_hub 2.4, transformers 5.24 and
datasets 5.2 use, with faults on demand.

    from hub_server import HubServer

    with HubServer(tmp_path) as hub:                       # or the fixture `hub` of tests/hub
        model = hub.create("user/name")                    # a repository from the server's side; kind="dataset"
        model.add({"config.json": "{}", "model.safetensors": data})   # a commit; add_folder(path), add_files(path)
        hub.faults.add(r"POST /api/.*/commit/", status=500, times=2)  # or 401, 409, 429 with retry_after=1
        hub.faults.add(r"PUT /upload/", cut=1000)          # the connection breaks after 1000 bytes of the upload
        hub.faults.add(r"GET /content/", cut=1000)         # ... of the download
        hub.faults.add(r"GET /api/", slow=2.0)             # seconds
        hub.faults.add(r"POST .*/commit/", lose_reply=True)  # it is done, but the client hears nothing
        done = subprocess.run([sys.executable, "-c", code], env=hub.environment(), ...)   # or hub_server.clients
        assert hub.faults.are_over                         # each happened as often as it was to
        repository = hub.repository("user/name")           # KeyError if there is none
        repository.files(), repository.files("v1.0")       # path -> File(blob_id, sha256, size, is_lfs)
        repository.read("README.md"), repository.history(), repository.branches, repository.tags, repository.is_private
        hub.requests_to(r"PUT /upload/")                   # each with status, received_bytes, sent_bytes, user

Clients read HF_ENDPOINT, HF_HUB_OFFLINE and HF_HUB_DISABLE_XET when they are imported, and the tests' own process is
offline: a client runs in a process of its own, started with `hub.environment()`. That has HF_ENDPOINT, HF_TOKEN
(`token=None` for none, `token=hub.add_user("other")` for another's), HF_HOME in the Hub's folder (`home="second"` for
a client with an empty cache), and nothing of the offline switches, proxies and caches of the process it was made in.

Addresses, as faults and `requests_to` see them ("METHOD /path?query", percent signs as they come):
    GET /api/whoami-v2    POST /api/repos/create    DELETE /api/repos/delete    POST /api/validate-yaml
    GET /api/agent-harnesses
    GET /api/models/user/name[/revision/REV|/tree/REV[/PATH]|/refs|/commits/REV]    POST .../paths-info/REV
    POST .../preupload/REV    POST .../commit/BRANCH    POST or DELETE .../branch/NAME    POST .../tag/REV
    DELETE .../tag/NAME    PUT .../settings             (datasets: /api/datasets/...)
    GET or HEAD /user/name/resolve/REV/PATH             (datasets: /datasets/user/name/...)
    POST /user/name.git/info/lfs/objects/batch, .../verify
    and of the storage, on another port: PUT /upload/TICKET, PUT /upload/TICKET/PART, POST /complete/TICKET,
    GET /content/SHA256

A large file of `multipart_bytes` or more comes in parts of `part_bytes`. A new repository has one commit with
.gitattributes. `hub.mistakes` holds what the server itself did wrong, and `RequestRecord.is_known` is False for an
address that it does not have; the fixture `hub` fails the test for either.
"""

from hub_server.errors import HubError
from hub_server.faults import RequestRecord
from hub_server.repositories import Commit, File, Repository
from hub_server.server import HubServer, User

__all__ = ["Commit", "File", "HubError", "HubServer", "Repository", "RequestRecord", "User"]
