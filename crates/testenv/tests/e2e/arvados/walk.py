"""Every call of the container queue's API, by the client as it comes from PyPI."""
import json, os, queue, socket, ssl, sys, threading, time

https, http, admin_token = sys.argv[1:4]
os.environ["ARVADOS_API_HOST"] = https
os.environ["ARVADOS_API_HOST_INSECURE"] = "1"
os.environ["ARVADOS_API_TOKEN"] = admin_token
import arvados, arvados.events, arvados.util
from arvados.errors import ApiError
import googleapiclient.errors


def api(token, **more):
    return arvados.api("v1", host=https, token=token, insecure=True, num_retries=0, **more)


def refused(call, status):
    began = time.monotonic()
    try:
        call.execute(num_retries=3)
    except googleapiclient.errors.HttpError as error:
        assert error.resp.status == status, (error.resp.status, error)
        assert time.monotonic() - began < 5, "the client tried again"
        return str(error)
    raise AssertionError(f"not refused with {status}")


admin = api(admin_token)


def new_dispatcher():
    body = {"api_client_authorization": {"scopes": ["dispatch"]}}
    made = admin.api_client_authorizations().create(body=body).execute()
    return f"v2/{made['uuid']}/{made['api_token']}"


def ask(by=admin, **more):
    request = {
        "name": "align", "state": "Committed", "priority": 600, "container_image": "debian:12",
        "command": ["sh", "-c", "echo hi"], "cwd": ".", "environment": {"K": "v"}, "output_path": "/out",
        "mounts": {"/out": {"kind": "tmp", "capacity": 1000000000}},
        "runtime_constraints": {"vcpus": 1, "ram": 268435456},
        "scheduling_parameters": {"max_run_time": 3600}, "use_existing": False, "container_count_max": 3,
    }
    request.update(more)
    return by.container_requests().create(body={"container_request": request}).execute()


def people():
    me = admin.users().current().execute()
    assert me["is_admin"] and me["is_active"] and me["username"] == "admin", me
    assert admin.users().get(uuid=me["uuid"]).execute()["uuid"] == me["uuid"]
    assert admin.users().list().execute()["items_available"] >= 1
    token = new_dispatcher()
    dispatcher = api(token)
    own = dispatcher.api_client_authorizations().current().execute()
    assert token == f"v2/{own['uuid']}/{own['api_token']}"
    assert own["uuid"] in [one["uuid"] for one in admin.api_client_authorizations().list().execute()["items"]]
    admin.api_client_authorizations().delete(uuid=own["uuid"]).execute()
    refused(dispatcher.users().current(), 401)


def plain():
    url = "http://" + http + "/discovery/v1/apis/{api}/{apiVersion}/rest"
    client = arvados.api("v1", discoveryServiceUrl=url, token=admin_token, num_retries=0)
    assert client.users().current().execute()["username"] == "admin"


def life():
    token = new_dispatcher()
    dispatcher = api(token)
    request = ask(secret_mounts={"/etc/key": {"kind": "text", "content": "c4nary"}})
    uuid = request["container_uuid"]
    assert request["container_count"] == 1 and "c4nary" not in json.dumps(request)
    listed = dispatcher.containers().list(
        filters=[["state", "=", "Queued"], ["priority", ">", 0]], order=["priority desc"], limit=10, count="none"
    ).execute()
    assert uuid in [one["uuid"] for one in listed["items"]] and "items_available" not in listed
    status = admin.container_requests().container_status(uuid=request["uuid"]).execute()
    assert status["container_state"] == "Queued", status
    say = lambda event, text: dispatcher.logs().create(body={"log": {
        "object_uuid": uuid, "event_type": "dispatch", "properties": {"event": event, "text": text}}}).execute()
    assert isinstance(say("decided_not_to_run", "no node offers 2 GPUs")["id"], int)
    status = admin.container_requests().container_status(uuid=request["uuid"]).execute()
    assert status["scheduling_status"] == "no node offers 2 GPUs", status
    locked = dispatcher.containers().lock(uuid=uuid).execute()
    assert locked["state"] == "Locked" and locked["attempt"] == 1 and locked["lock_count"] == 1
    mine = dispatcher.containers().current().execute()
    assert [one["uuid"] for one in mine["items"]] == [uuid]
    dispatch = dispatcher.containers().list(filters=[["dispatch_auth_uuid", "=", locked["locked_by_uuid"]]]).execute()
    assert dispatch["items_available"] == 1
    auth = dispatcher.containers().auth(uuid=uuid).execute()
    assert dispatcher.api_client_authorizations().get(uuid=auth["uuid"]).execute()["api_token"] == auth["api_token"]
    inside = api(f"v2/{auth['uuid']}/{auth['api_token']}/{uuid}")
    assert inside.containers().current().execute()["uuid"] == uuid
    assert inside.containers().secret_mounts(uuid=uuid).execute()["secret_mounts"]["/etc/key"]["content"] == "c4nary"
    refused(dispatcher.containers().secret_mounts(uuid=uuid), 403)
    refused(admin.containers().current(), 404)
    refused(api(new_dispatcher()).containers().unlock(uuid=uuid), 403)
    executor = api(locked["executor_token"])
    put = lambda client, **what: client.containers().update(uuid=uuid, body={"container": what})
    refused(put(executor, state="Running", attempt=2), 422)
    assert put(executor, state="Running", attempt=1).execute()["started_at"]
    put(inside, progress=0.5).execute()
    refused(put(inside, state="Complete", exit_code=0), 422)
    done = put(executor, state="Complete", exit_code=0, attempt=1).execute()
    assert done["state"] == "Complete" and done["finished_at"]
    for dead in inside, executor:
        refused(dead.containers().get(uuid=uuid), 401)
    assert admin.container_requests().get(uuid=request["uuid"]).execute()["state"] == "Final"
    rows = admin.logs().list(filters=[["object_uuid", "=", uuid]], order="id asc").execute()
    assert [row["event_type"] for row in rows["items"]].count("dispatch") == 1
    assert admin.logs().get(uuid=rows["items"][0]["uuid"]).execute()["id"] == rows["items"][0]["id"]
    ids = [row["id"] for row in rows["items"]]
    assert ids == sorted(ids)
    assert "c4nary" not in json.dumps(rows)


def priorities():
    dispatcher = api(new_dispatcher())
    request = ask(priority=5)
    uuid = request["container_uuid"]
    put = lambda priority: admin.container_requests().update(
        uuid=request["uuid"], body={"container_request": {"priority": priority}}).execute()
    put(0)
    assert admin.containers().get(uuid=uuid).execute()["priority"] == 0
    refused(dispatcher.containers().lock(uuid=uuid), 422)
    put(7)
    assert admin.containers().update_priority(uuid=uuid).execute()["priority"] == 7
    for attempt in range(1, 11):
        assert dispatcher.containers().lock(uuid=uuid).execute()["attempt"] == attempt
        free = dispatcher.containers().unlock(uuid=uuid, attempt=attempt).execute()
    assert free["state"] == "Cancelled", free
    admin.container_requests().delete(uuid=request["uuid"]).execute()
    refused(admin.container_requests().get(uuid=request["uuid"]), 404)
    bare = {"command": ["true"], "container_image": "x", "output_path": "/o", "mounts": {"/o": {"kind": "tmp"}},
            "runtime_constraints": {"vcpus": 1, "ram": 1}}
    bare = admin.containers().create(body={"container": bare}).execute()
    admin.containers().delete(uuid=bare["uuid"]).execute()
    refused(admin.containers().get(uuid=bare["uuid"]), 404)


def race():
    tokens = [new_dispatcher() for _ in range(4)]
    uuid = ask()["container_uuid"]
    clients = [api(tokens[at % 4]) for at in range(16)]
    start, got = threading.Barrier(16), []

    def one(client):
        start.wait()
        try:
            client.containers().lock(uuid=uuid).execute(num_retries=3)
            got.append(200)
        except googleapiclient.errors.HttpError as error:
            got.append(error.resp.status)

    threads = [threading.Thread(target=one, args=[client]) for client in clients]
    began = time.monotonic()
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(got) == [200] + [422] * 15, got
    assert time.monotonic() - began < 20, "somebody tried again"


def lists():
    uuids = [ask(name=f"list {at}", use_existing=True, command=["same"])["uuid"] for at in range(12)]
    many = uuids + [f"wlass-xvhdp-{at:015}" for at in range(100)]
    found = admin.container_requests().list(filters=[["uuid", "in", many]], select=["uuid"]).execute()
    assert sorted(one["uuid"] for one in found["items"]) == sorted(uuids), "tunnelled through a POST"
    shared = admin.container_requests().list(filters=[["uuid", "in", uuids]]).execute()
    assert len({one["container_uuid"] for one in shared["items"]}) == 1, "reused"
    everything = list(arvados.util.keyset_list_all(
        admin.container_requests().list, filters=[["name", "like", "list %"]], page_size=5)
        if "page_size" in arvados.util.keyset_list_all.__code__.co_varnames else
        arvados.util.keyset_list_all(admin.container_requests().list, filters=[["name", "like", "list %"]]))
    assert len(everything) == 12
    refused(admin.containers().list(filters=[["colour", "=", 1]]), 422)


def events():
    heard = queue.Queue()
    since = admin.logs().list(order="id desc", limit=1).execute()["items"][0]["id"]
    client = arvados.events.subscribe(admin, [], heard.put, poll_fallback=False)
    uuid = ask()["container_uuid"]

    def until(is_it):
        deadline = time.monotonic() + 40
        while True:
            event = heard.get(timeout=max(0.1, deadline - time.monotonic()))
            if is_it(event):
                return event

    made = until(lambda event: event.get("object_uuid") == uuid)
    assert made["event_type"] == "create" and made["object_kind"] == "arvados#container", made
    dispatcher = api(new_dispatcher())
    dispatcher.containers().lock(uuid=uuid).execute()
    locked = until(lambda event: event.get("object_uuid") == uuid)
    new = locked["properties"]["new_attributes"]
    assert (new["state"], new["attempt"], locked["properties"]["old_attributes"]["state"]) == ("Locked", 1, "Queued")
    client.close()
    # Somebody who was away hears all of it, once and in order.
    heard = queue.Queue()
    client = arvados.events.subscribe(
        admin, [["object_uuid", "=", uuid]], heard.put, poll_fallback=False, last_log_id=since)
    dispatcher.containers().unlock(uuid=uuid).execute()
    ids, states = [], []
    while len(states) < 3:
        event = until(lambda event: event.get("object_uuid") == uuid)
        ids.append(event["id"])
        states.append(event["properties"]["new_attributes"]["state"])
    assert states == ["Queued", "Locked", "Queued"] and ids == sorted(set(ids)), (states, ids)
    client.close()


for part in people, plain, life, priorities, race, lists, events:
    part()
    print(part.__name__, "ok", flush=True)
os._exit(0)
