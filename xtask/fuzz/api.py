"""Requests made from the OpenAPI document by schemathesis, as an admin and as an ordinary user.

Run as a program it prepares people and things in a server that is up, lets schemathesis send its requests once
for each of them, and says how many there were. Imported by schemathesis it is the hooks: they steer some of the
requests to things that exist, and keep the two callers alive.

Every choice follows from the request itself, so that a seed repeats a run.
"""

import atexit
import collections
import json
import os
import subprocess
import sys
import urllib.request
import zlib

import schemathesis

# What must hold for every answer: no failure of the server, no status, type or shape that the document lacks.
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "ignored_auth",
]
PROJECTS = ["main", "main", "main", "lab", "none"]
# Requests that could take away a caller, or the rights a caller has.
DEADLY = {
    "refresh_token", "delete_users", "update_user", "set_members", "remove_members", "delete_projects", "add_members",
    "update_project",
}
KEPT = ["admin", "mira", "main", "lab"]

TASK = {"type": "task", "commands": ["true"], "image": "debian", "user": "root"}
RUN = {"configuration": TASK, "run_name": "train-1"}
VOLUME = {"type": "volume", "name": "data", "backend": "aws", "region": "r", "size": 1}
GATEWAY = {"type": "gateway", "name": "edge", "backend": "aws", "region": "r"}
FLEET = {"configuration": {"type": "fleet", "name": "own", "nodes": "0..2"}, "profile": {"name": "x"}}
# Values by the field they fit: with them more than the first check is reached.
KNOWN = {
    "run_spec": [RUN, dict(RUN, run_name=None), {"configuration": dict(TASK, type="service", port=80)}],
    "run_name": ["train-1", "none"],
    "spec": [FLEET, GATEWAY],
    "configuration": [VOLUME, GATEWAY, TASK],
    "name": ["own", "data", "edge", "key", "none"],
    "names": [["own"], ["data", "none"], []],
    "secrets_names": [["key"]],
    "runs_names": [["train-1"], ["none"]],
    "repo_id": ["r1"],
    "repo_info": [{"repo_type": "remote", "repo_name": "r"}, {"repo_type": "local", "repo_dir": "/x"}],
    "username": ["mira", "none"],
    "value": ["v"],
}

SEEN = collections.Counter()
STATUSES = collections.Counter()


def choose(of, by):
    return of[zlib.crc32(by.encode("utf-8", "surrogatepass")) % len(of)]


@schemathesis.hook
def map_path_parameters(context, path_parameters):
    if path_parameters and "project_name" in path_parameters:
        text = context.operation.label + repr(sorted(path_parameters.items()))
        # One in six keeps what was drawn, however odd.
        path_parameters["project_name"] = choose(PROJECTS + [path_parameters["project_name"]], text)
    return path_parameters


@schemathesis.hook
def map_body(context, body):
    if isinstance(body, dict) and operation(context) not in DEADLY:
        steer(body, 0)
    return body


def operation(context):
    return (context.operation.definition.raw or {}).get("operationId")


def steer(body, depth):
    for field, value in list(body.items()):
        if field in KNOWN:
            known = choose([None] + KNOWN[field], field + repr(value)[:200])
            body[field] = value if known is None else json.loads(json.dumps(known))
        if isinstance(body[field], dict) and depth < 3:
            steer(body[field], depth + 1)


@schemathesis.hook
def filter_body(context, body):
    text = repr(body)
    return operation(context) not in DEADLY or not any(name in text for name in KEPT)


@schemathesis.hook
def after_call(context, case, response):
    SEEN[case.operation.label] += 1
    STATUSES[str(response.status_code)] += 1


def tell():
    path = os.environ.get("FUZZ_COUNTS")
    if path and SEEN:
        with open(path, "w", encoding="utf-8") as out:
            json.dump({"cases": sum(SEEN.values()), "operations": len(SEEN), "statuses": STATUSES}, out)


atexit.register(tell)


def call(url, token, path, body):
    request = urllib.request.Request(
        url + path,
        data=json.dumps(body).encode(),
        headers={"Authorization": "Bearer " + token, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def prepare(url, admin):
    """People, and one of each thing that needs no machine. Gives the token of the user."""
    mira = call(url, admin, "/api/users/create", {"username": "mira", "global_role": "user"})["creds"]["token"]
    call(url, mira, "/api/projects/create", {"project_name": "lab"})
    member = {"username": "mira", "project_role": "user"}
    call(url, admin, "/api/projects/main/add_members", {"members": [member]})
    for project, token in [("main", admin), ("lab", mira)]:
        base = "/api/project/" + project
        call(url, token, base + "/runs/apply", {"plan": {"run_spec": RUN}, "force": False})
        call(url, token, base + "/fleets/apply", {"plan": {"spec": FLEET}, "force": False})
        call(url, token, base + "/secrets/create_or_update", {"name": "key", "value": "v"})
    return mira


def fuzz(document, url, token, phases, examples, seed, folder, name):
    counts = os.path.join(folder, name + ".counts.json")
    command = [
        os.path.join(os.path.dirname(sys.executable), "schemathesis"), "--config-file", os.path.join(folder, "schemathesis.toml"),
        "run", document, "--url", url,
        "--header", "Authorization: Bearer " + token, "--checks", ",".join(CHECKS), "--phases", phases,
        "--max-examples", str(examples), "--seed", str(seed), "--continue-on-failure", "--request-timeout", "60",
        "--suppress-health-check", "all", "--warnings", "off", "--output-sanitize", "true",
    ]
    here = os.path.abspath(__file__)
    environment = dict(os.environ, FUZZ_COUNTS=counts, SCHEMATHESIS_HOOKS="api", PYTHONPATH=os.path.dirname(here), PYTHONDONTWRITEBYTECODE="1")
    # Whatever a client sends by a proxy would not reach this machine's own server.
    environment["NO_PROXY"] = "*"
    ended = subprocess.run(command, env=environment, cwd=folder, check=False).returncode
    with open(counts, encoding="utf-8") as text:
        told = json.load(text)
    return ended, told


def main():
    document, url, folder, wanted, seed, only = sys.argv[1:7]
    wanted = int(wanted)
    admin = os.environ["WINDLASS_SERVER_ADMIN_TOKEN"]
    mira = prepare(url, admin)
    with open(document, encoding="utf-8") as text:
        operations = sum(len(methods) for methods in json.load(text)["paths"].values())
    with open(os.path.join(folder, "schemathesis.toml"), "w", encoding="utf-8") as config:
        # Streams stay open; their first event tells their form.
        config.write("max-stream-events = 1\n")
    # Each edge of each schema once where there is room for it; the rest is drawn at random.
    phases = "coverage,fuzzing" if wanted >= 50 * operations else "fuzzing"
    examples = max(1, -(-wanted // (2 * operations)))
    failed, cases = 0, 0
    for name, token in [("admin", admin), ("user", mira)]:
        if only not in ("both", name):
            continue
        ended, told = fuzz(document, url, token, phases, examples, seed, folder, name)
        failed += ended != 0
        cases += told["cases"]
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(told["statuses"].items()))
        print(f"as {name}: {told['cases']} requests of {told['operations']} operations ({statuses})", flush=True)
    # Both are still who they were, and the server is.
    for token in [admin, mira]:
        call(url, token, "/api/users/get_my_user", {})
    print(f"{cases} requests in all, seed {seed}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
