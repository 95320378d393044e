"""An OpenID Connect provider: oidc-provider-mock on a port of this machine, which also requires PKCE and admits public
clients, as others do.

Prints its URL. The claims of a user are set with `PUT /users/SUBJECT`.
"""

import base64
import hashlib
from io import BytesIO
from urllib.parse import parse_qs

import oidc_provider_mock
from oidc_provider_mock._app import AuthorizationCodeGrant
from werkzeug.serving import make_server


class Pkce:
    """Refuses a code without the verifier whose hash its authorization named."""

    def __init__(self, app):
        self.app = app
        self.challenges = {}

    def __call__(self, environ, start_response):
        path = environ["PATH_INFO"]
        if path == "/oauth2/authorize" and environ["REQUEST_METHOD"] == "POST":
            query = parse_qs(environ["QUERY_STRING"])
            if query.get("code_challenge_method") != ["S256"] or not query.get("code_challenge"):
                return self.refuse(start_response, "invalid_request")
            challenge = query["code_challenge"][0]

            def remember(status, headers, *rest):
                location = dict(headers).get("Location", "")
                for code in parse_qs(location.partition("?")[2]).get("code", []):
                    self.challenges[code] = challenge
                return start_response(status, headers, *rest)

            return self.app(environ, remember)
        if path == "/oauth2/token":
            length = int(environ.get("CONTENT_LENGTH") or 0)
            body = environ["wsgi.input"].read(length)
            form = parse_qs(body.decode())
            verifier = form.get("code_verifier", [""])[0]
            digest = hashlib.sha256(verifier.encode()).digest()
            challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            if self.challenges.pop(form.get("code", [""])[0], None) != challenge:
                return self.refuse(start_response, "invalid_grant")
            environ["wsgi.input"] = BytesIO(body)
        return self.app(environ, start_response)

    def refuse(self, start_response, error):
        body = ('{"error": "%s"}' % error).encode()
        start_response("400 Bad Request", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]


# Public clients have no secret: PKCE takes its place.
AuthorizationCodeGrant.TOKEN_ENDPOINT_AUTH_METHODS = ["client_secret_basic", "client_secret_post", "none"]
app = oidc_provider_mock.app(require_nonce=True)
app.debug = False
server = make_server("127.0.0.1", 0, Pkce(app.wsgi_app), threaded=True)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
