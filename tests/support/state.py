"""A patch for a gateway that tells what is left in it, for tests that want nothing to be."""

# Connections to the engine rest for a moment only, so that a look at what is left need not wait for them; and
# GET /state tells what no route of the gateway's does.
STATE = """
import gc, json
from front import app
from engines import http1
from admission import Gate
from gevent import Greenlet

http1.IDLE = 0.3
create, activate = app.create_app, Gate.activate

def create_app(gateway, *rest):
    made = create(gateway, *rest)
    small_app = made.small_app

    def with_state(environ, start_response):
        if environ["PATH_INFO"] != "/state":
            return small_app(environ, start_response)
        text = json.dumps(state(gateway)).encode()
        start_response("200 OK", [("Content-Length", str(len(text)))])
        return [text]

    made.small_app = with_state
    return made

def state(gateway):
    gc.collect()
    return {"greenlets": sum(isinstance(o, Greenlet) and not o.dead for o in gc.get_objects()), "live": len(gateway.live),
            "held": gateway.bodies.held, "idle": len(gateway.fleet.engines[0].pool.idle), "most": getattr(gateway.gate, "most", 0),
            "put by": sum(abs(account.reserved) + abs(round(account.pending, 3)) for account in gateway.gate.accounts.values())}

def counted(gate, ticket, place, now):
    activated = activate(gate, ticket, place, now)
    gate.most = max(getattr(gate, "most", 0), gate.active)
    return activated

app.create_app, Gate.activate = create_app, counted
"""


def state(gateway):
    return gateway.client(key=False).get("/state").json()
