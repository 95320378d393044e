"""Calls every operation that dstack 0.22.5 has and the server answers, and holds each answer against the schema of that
operation and against the model that dstack's own client reads it with. Prints one JSON document."""

import hashlib, importlib, io, json, pkgutil, re, sys, tarfile, time, typing
from pathlib import Path

import jsonschema, pydantic, requests
import dstack._internal.core.models as core_models
import dstack._internal.server.schemas as schemas
import dstack.api.server
from dstack._internal.core.models.common import validate_extra_ignore
from dstack._internal.core.models.runs import RunSpec

url, token, document, version = sys.argv[1], sys.argv[2], json.load(open(sys.argv[3])), "0.22.5"
operations = document["operations"]
session = requests.Session()
session.headers.update({"Authorization": f"Bearer {token}", "X-API-VERSION": version})
walked, wrong = set(), {}


def say(what):
    """Once, however often it is so."""
    wrong.setdefault(what[:120], what)


def models():
    """Every model of the client by its name; names that two models have are left out."""
    by_name = {}
    for package in core_models, schemas:
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            for name, kind in vars(importlib.import_module(module.name)).items():
                if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
                    by_name.setdefault(name, set()).add(kind)
    return {name: kinds.pop() for name, kinds in by_name.items() if len(kinds) == 1}


MODELS = models()


def model_of(schema):
    """The type that a client reads this with, or None."""
    if "$ref" in schema:
        name = schema["$ref"].split("/")[-1].removesuffix("-Output").removesuffix("-Input")
        return MODELS.get(name)
    if schema.get("type") == "array":
        item = model_of(schema["items"])
        return typing.List[item] if item else None
    return None


def check(operation, answer):
    schema = operations[operation]
    if not schema:
        return
    whole = {**schema, "components": {"schemas": document["schemas"]}}
    validator = jsonschema.Draft202012Validator(whole, format_checker=jsonschema.FormatChecker())
    for error in validator.iter_errors(answer):
        error = jsonschema.exceptions.best_match([error])
        say(f"{operation}: at {error.json_path}: {error.message[:300]}")
    model = model_of(schema)
    if model:
        try:
            validate_extra_ignore(model, answer)
        except pydantic.ValidationError as error:
            say(f"{operation}: the client's model: {error}")


def call(operation, body=None, status=200, files=None, query=None, **names):
    method, path = operation.split(" ")
    place = path.format(project_name=names.get("project", "main"), **{k: v for k, v in names.items() if k != "project"})
    data = None if body is None else json.dumps(body)
    headers = {"Content-Type": "application/json"} if data else {}
    response = session.request(method, url + place, data=data, headers=headers, files=files, params=query)
    if response.status_code != status:
        say(f"{operation}: status {response.status_code}, want {status}: {response.text[:500]}")
        return None
    walked.add(operation)
    if "json" not in response.headers["content-type"]:
        return response.text
    answer = response.json()
    if status == 200:
        check(operation, answer)
    else:
        detail = answer["detail"]
        if status == 400 and not (len(detail) == 1 and {"code", "msg"} <= set(detail[0]) <= {"code", "msg", "fields"}):
            say(f"{operation}: an error that clients do not read: {answer}")
    return answer


def post(path, body=None, **more):
    return call(f"POST /api/{path}", body, **more)


def project(path, body=None, **more):
    return call(f"POST /api/project/{{project_name}}/{path}", body, **more)


def until(what, ask, wanted):
    for _ in range(600):
        answer = ask()
        if wanted(answer):
            return answer
        time.sleep(0.2)
    say(f"in vain until {what}: {json.dumps(answer)[:2000]}")
    return answer


def server_and_users():
    post("server/get_info")
    call("GET /healthcheck")
    call("GET /metrics")
    post("auth/list_providers")
    post("auth/get_next_redirect", {"code": "x", "state": "x"})
    post("backends/list_types")
    post("users/get_my_user")
    post("users/create", {"username": "ben", "global_role": "user", "email": "ben@example.com", "active": True})
    post("users/update", {"username": "ben", "global_role": "user", "email": None, "active": True})
    post("users/get_user", {"username": "ben"})
    post("users/list")
    post("users/list", {"return_total_count": True})
    post("users/refresh_token", {"username": "ben"})
    post("users/refresh_ssh_key", {"username": "ben"})
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl laptop"
    added = post("users/public_keys/add", {"key": key, "name": "laptop"})
    post("users/public_keys/list")
    post("users/public_keys/delete", {"ids": [added["id"]]})


def projects():
    post("projects/create", {"project_name": "second", "is_public": False})
    post("projects/list")
    post("projects/list", {"include_not_joined": True, "return_total_count": True})
    post("projects/list_only_no_fleets")
    of = lambda path, body=None: call(f"POST /api/projects/{{project_name}}/{path}", body, project="second")
    of("get")
    of("add_members", {"members": [{"username": "ben", "project_role": "user"}]})
    of("set_members", {"members": [{"username": "admin", "project_role": "admin"},
                                   {"username": "ben", "project_role": "manager"}]})
    of("remove_members", {"usernames": ["ben"]})
    of("update", {"is_public": True})
    exports()
    post("projects/delete", {"projects_names": ["second"]})
    post("users/delete", {"users": ["ben"]})
    project("templates/list")


def exports():
    project("exports/create", {"name": "shared", "importer_projects": ["second"], "exported_fleets": ["local"]})
    project("exports/list")
    project("imports/list", project="second")
    project("imports/delete", {"export_name": "shared", "export_project_name": "main"}, project="second")
    project("exports/update", {"name": "shared", "add_importer_projects": ["second"]})
    project("exports/delete", {"name": "shared"})


def code_files_and_secrets():
    info = {"repo_type": "remote", "repo_name": "code"}
    creds = {"clone_url": "https://git.example.com/code.git", "private_key": None, "oauth_token": None}
    project("repos/init", {"repo_id": "code", "repo_info": info, "repo_creds": creds})
    project("repos/get", {"repo_id": "code", "include_creds": True})
    project("repos/list")
    patch = b"diff"
    name = hashlib.sha256(patch).hexdigest()
    project("repos/upload_code", files={"file": (name, patch)}, query={"repo_id": "code"})
    project("repos/delete", {"repos_ids": ["code"]})
    tar = io.BytesIO()
    tarfile.open(fileobj=tar, mode="w").close()
    hash = hashlib.sha256(tar.getvalue()).hexdigest()
    post("files/upload_archive", files={"file": (hash, tar.getvalue())})
    post("files/get_archive_by_hash", {"hash": hash})
    project("secrets/create_or_update", {"name": "token", "value": "hunter2"})
    project("secrets/get", {"name": "token"})
    project("secrets/list")
    project("secrets/delete", {"secrets_names": ["token"]})
    project("secrets/get", {"name": "token"}, status=400)


def run_spec(kind, name, **more):
    configuration = {"type": kind, "name": name, "image": "none", "user": "root", "env": {"A": "1"},
                     "resources": {"cpu": {"count": {"min": 1}}, "memory": {"min": 0.1}, "disk": None}, **more}
    spec = {"run_name": name, "repo_id": "none", "repo_data": {"repo_type": "virtual"}, "configuration": configuration,
            "configuration_path": "job.yml", "profile": {"name": "default"}, "ssh_key_pub": None}
    # As the client writes it.
    return json.loads(RunSpec.model_validate(spec).model_dump_json())


def machines():
    local = until("this machine is there", lambda: project("fleets/get", {"name": "local"}),
                  lambda fleet: fleet and fleet["instances"] and fleet["instances"][0]["status"] in ("idle", "busy"))
    post("fleets/list", {})
    project("fleets/list", {"include_imported": True})
    cloud = {"configuration": {"type": "fleet", "name": "cloud", "nodes": {"min": 0, "target": 0, "max": 1}},
             "profile": {"name": "default"}}
    plan = project("fleets/get_plan", {"spec": cloud})
    if plan:
        project("fleets/apply", {"plan": {"spec": cloud, "current_resource": None}, "force": False})
    project("fleets/delete_instances", {"name": "cloud", "instance_nums": [0]}, status=400)
    project("fleets/delete", {"names": ["cloud"]})
    instance = local["instances"][0]["id"]
    post("instances/list", {})
    project("instances/get", {"id": instance})
    project("instances/get_instance_health_checks", {"fleet_name": "local", "instance_num": 0})


def runs():
    for kind, more in [("task", {"commands": ["ls"], "ports": [8000], "nodes": 2}), ("dev-environment", {"ide": "vscode"}),
                       ("service", {"commands": ["ls"], "port": 8000})]:
        project("runs/get_plan", {"run_spec": run_spec(kind, "planned", **more), "max_offers": 3})
    project("gpus/list", {"run_spec": run_spec("task", "planned", commands=["ls"]), "group_by": ["backend"]})
    spec = run_spec("task", "walked", commands=["echo up; sleep 600"], ports=[{"local_port": 7007, "container_port": 7007}])
    project("runs/apply", {"plan": {"run_spec": spec, "current_resource": None}, "force": False})
    project("runs/get", {"run_name": "nothing"}, status=400)
    get = lambda: project("runs/get", {"run_name": "walked"})
    run = until("it runs", get, lambda run: run["status"] == "running")
    project("runs/get_plan", {"run_spec": spec, "max_offers": 3})
    post("runs/list", {"project_name": "main", "only_active": True, "include_jobs": True, "limit": 100})
    poll = {"run_name": "walked", "job_submission_id": run["jobs"][0]["job_submissions"][0]["id"], "limit": 100}
    until("it speaks", lambda: project("logs/poll", poll), lambda page: page["logs"])
    until("it is measured", lambda: call("GET /api/project/{project_name}/metrics/job/{run_name}", run_name="walked",
                                         query={"limit": 10}), lambda seen: seen["metrics"])
    post("events/list", {"limit": 100})
    project("runs/delete", {"runs_names": ["walked"]}, status=400)
    project("runs/stop", {"runs_names": ["walked"], "abort": True})
    until("it is stopped", get, lambda run: run["status"] == "terminated")
    project("runs/delete", {"runs_names": ["walked"]})


def volumes_and_gateways():
    # The client knows volumes of clouds only, and this server rents from none.
    volume = {"type": "volume", "name": "data", "backend": "aws", "region": "eu-west-1", "size": 10}
    project("volumes/create", {"configuration": volume}, status=400)
    project("volumes/get", {"name": "data"}, status=400)
    project("volumes/list")
    post("volumes/list", {})
    project("volumes/delete", {"names": ["data"]}, status=400)
    gateway = {"type": "gateway", "name": "door", "backend": "remote", "region": "eu-west-1", "domain": "example.com"}
    project("gateways/get_plan", {"spec": {"configuration": gateway, "configuration_path": "door.yml"}})
    project("gateways/apply", {"plan": {"spec": {"configuration": gateway, "configuration_path": "door.yml"},
                                        "current_resource": None}, "force": False})
    project("gateways/create", {"configuration": {**gateway, "name": "other"}})
    project("gateways/list", {"include_imported": True})
    project("gateways/get", {"name": "door"})
    project("gateways/set_default", {"name": "door"})
    project("gateways/set_wildcard_domain", {"name": "door", "wildcard_domain": "example.org"})
    project("gateways/delete", {"names": ["door", "other"]})


def called_by_the_client():
    """The paths in the sources of the client, as the document writes them."""
    paths = set()
    for file in Path(dstack.api.server.__file__).parent.glob("*.py"):
        for path in re.findall(r'"(/api/[^"]*)"', file.read_text()):
            paths.add(re.sub(r"\{(\w+)\.value\}", r"{\1}", path))
    return sorted(paths)


for part in server_and_users, projects, code_files_and_secrets, machines, runs, volumes_and_gateways:
    try:
        part()
    except Exception as error:
        say(f"{part.__name__}: {error!r}")
print(json.dumps({"walked": sorted(walked), "wrong": list(wrong.values()), "called": called_by_the_client()}))
