"""moto with what EC2 has and moto lacks: idempotent creations, limits, delays and interruptions.

usage: server.py PORT CONTROL_DIR

CONTROL_DIR/control.json says what goes wrong; it is read at each call, and its counters begin again when it changes:
  full, quota   list of patterns of `TYPE ZONE on-demand|spot` that are out of capacity, or over a quota
  throttle      number of calls that are refused because of their rate
  lost          number of creations of machines whose answer is lost
  late          number of lists that a new machine is missing in
  pending       number of lists after these in which it is `pending`
  denied        list of actions without permission
  interrupt     list of ids of machines that are reclaimed
  addresses     public addresses of machines, in the order of their creation
Each machine that is created is a file CONTROL_DIR/started/ID with its address and its user data.
"""

import base64
import copy
import fnmatch
import json
import pathlib
import sys
import threading

from moto import server
from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.elastic_block_store import EBSBackend
from moto.ec2.models.instances import InstanceBackend, InstanceState, StateReason
from moto.ec2.responses import EC2Response

port, control_dir = sys.argv[1], pathlib.Path(sys.argv[2])
lock = threading.RLock()
last_text, used = None, {}
tokens, listed, addresses, prepared = {}, {}, [], set()


def control():
    global last_text, used
    try:
        text = (control_dir / "control.json").read_text()
    except FileNotFoundError:
        text = "{}"
    if text != last_text:
        last_text, used = text, {}
    return json.loads(text)


def take(name):
    """Returns whether one of the counted misfortunes is left."""
    used[name] = used.get(name, 0) + 1
    return used[name] <= control().get(name, 0)


def prepare(backend):
    """Gives the default VPC of a region its way to the internet, as AWS does."""
    if backend.region_name in prepared:
        return
    prepared.add(backend.region_name)
    vpc = next(vpc for vpc in backend.describe_vpcs() if vpc.is_default == "true" or vpc.is_default is True)
    gateway = backend.create_internet_gateway()
    backend.attach_internet_gateway(gateway.id, vpc.id)
    table = next(table for table in backend.describe_route_tables() if table.vpc_id == vpc.id)
    backend.create_route(table.id, "0.0.0.0/0", None, gateway_id=gateway.id)


call_action = EC2Response.call_action
run_instances = InstanceBackend.run_instances
describe_instances = InstanceBackend.describe_instances
create_volume = EBSBackend.create_volume


def call(self):
    action = self._get_action()
    with lock:
        prepare(self.ec2_backend)
        if action in control().get("denied", []):
            error = EC2ClientError("UnauthorizedOperation", "You are not authorized to perform this operation.")
        elif take("throttle"):
            error = EC2ClientError("RequestLimitExceeded", "Request limit exceeded.")
        else:
            self.ec2_backend.volume_token = self._get_param("ClientToken") if action == "CreateVolume" else None
            status, headers, body = call_action(self)
            if action != "RunInstances" or int(status) != 200 or not take("lost"):
                return status, headers, body
            error = EC2ClientError("InternalError", "An internal error has occurred.")
        return self.serialized(ActionResult(error))


def run(self, image_id, count, user_data, security_group_names, **kwargs):
    zone = kwargs.get("placement")
    market = "spot" if kwargs.get("instance_market_options") else "on-demand"
    offer = f"{kwargs['instance_type']} {zone} {market}"
    token = (self.region_name, kwargs["client_token"])
    parameters = (image_id, offer, str(user_data))
    if token in tokens:
        reservation, first = tokens[token]
        if first != parameters:
            raise EC2ClientError("IdempotentParameterMismatch", "Arguments on this idempotent request are different.")
        return reservation
    for name, code in [("full", "InsufficientInstanceCapacity"), ("quota", "VcpuLimitExceeded")]:
        if any(fnmatch.fnmatch(offer, pattern) for pattern in control().get(name, [])):
            raise EC2ClientError(code, f"We do not have enough of {offer}.")
    reservation = run_instances(self, image_id, count, user_data, security_group_names, **kwargs)
    tokens[token] = reservation, parameters
    for instance in reservation.instances:
        listed[instance.id] = 0
        public = control().get("addresses", [])
        if len(addresses) < len(public):
            instance.nics[0].public_ip = public[len(addresses)]
            addresses.append(instance.id)
        started = control_dir / "started"
        started.mkdir(exist_ok=True)
        script = base64.b64decode(str(user_data or "")).decode()
        about = {"address": instance.nics[0].public_ip, "user_data": script, "zone": zone, "market": market}
        (started / f".{instance.id}").write_text(json.dumps(about))
        (started / f".{instance.id}").rename(started / instance.id)
    return reservation


def describe(self, filters=None):
    late, pending = control().get("late", 0), control().get("pending", 0)
    visible = []
    for reservation in describe_instances(self, filters):
        shown = copy.copy(reservation)
        shown.instances = []
        for instance in reservation.instances:
            lists = listed[instance.id] = listed.get(instance.id, 0) + 1
            if lists <= late:
                continue
            if instance.id in control().get("interrupt", []) and instance._state.name == "running":
                instance.terminate()
                instance.state_reason = StateReason(
                    "Server.SpotInstanceTermination: reclaimed", "Server.SpotInstanceTermination"
                )
            if instance._state.name in ("pending", "running"):
                starts = lists <= late + pending
                instance._state = InstanceState("pending", 0) if starts else InstanceState("running", 16)
            shown.instances.append(instance)
        if shown.instances:
            visible.append(shown)
    return visible


def volume(self, *args, **kwargs):
    # The disks of machines and of images are made without a call of their own.
    token = getattr(self, "volume_token", None)
    if token is None:
        return create_volume(self, *args, **kwargs)
    if (self.region_name, "volume", token) in tokens:
        return tokens[self.region_name, "volume", token]
    made = tokens[self.region_name, "volume", token] = create_volume(self, *args, **kwargs)
    return made


EC2Response.call_action = call
InstanceBackend.run_instances = run
InstanceBackend.describe_instances = describe
EBSBackend.create_volume = volume
server.main(["-H", "127.0.0.1", "-p", port])
