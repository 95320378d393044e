"""A replica in a test: says who it is, streams, echoes, and can be made ill. The port is its argument."""
import base64, hashlib, os, sys, threading, time, uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Two on two hosts may have the same process id.
REPLICA = uuid.uuid4().hex
VERSION = os.environ.get("VERSION", "1")
WELL = [os.environ.get("SICK") is None]
GATE = threading.Event()
SEEN = []
SLOW = [0]
MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Page(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def say(self, text, status=200):
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        """All of it: nothing of it is the next request. Who breaks off among its chunks gets no answer."""
        if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return body

    def events(self, first, second):
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(first)
        self.wfile.flush()
        GATE.wait(60)
        self.wfile.write(second)

    def echo(self):
        self.close_connection = True
        key = self.headers["Sec-WebSocket-Key"] + MAGIC
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_header("Sec-WebSocket-Accept", accept)
        self.end_headers()
        while data := self.connection.recv(4096):
            self.connection.sendall(data)

    def do_GET(self):
        path = self.path.split("?")[0]
        if path == "/seen":
            return self.say("".join(f"{line}\n" for line in SEEN))
        if path == "/forget":
            SEEN.clear()
            return self.say("forgotten")
        SEEN.append(f"GET {self.path}")
        self.body()
        if path == "/health":
            return self.say("health", 200 if WELL[0] else 500)
        if path in ("/sick", "/well"):
            WELL[0] = path == "/well"
            return self.say(path)
        if path == "/open":
            GATE.set()
            return self.say("open")
        if path == "/waiting":
            return self.say(f"slow={SLOW[0]}")
        if path == "/slow":
            SLOW[0] += 1
            GATE.wait(60)
            return self.say("slow")
        if path == "/nap":
            time.sleep(0.2)
            return self.say("nap")
        if path == "/sse":
            return self.events(b"data: one\n\n", b"data: two\n\n")
        if path == "/ws":
            return self.echo()
        token = self.headers.get("Authorization", "none")
        self.say(f"version={VERSION} replica={REPLICA} path={self.path} token={token}\n")

    def do_POST(self):
        SEEN.append(f"POST {self.path}")
        body = self.body()
        if self.path == "/v1/chat/completions":
            return self.events(b"data: {}\n\n", b"data: [DONE]\n\n")
        self.say(hashlib.sha256(body).hexdigest())


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
