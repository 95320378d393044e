//! A real server on a separate port, and raw requests to it.

use std::net::SocketAddr;

use http_body_util::{BodyExt, Full};
use hyper::{Request, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{net::TcpStream, sync::oneshot, task::JoinHandle};
use windlass_server::{
    Server,
    app::App,
    config::{Settings, SettingsSource},
    db::{Unit, backends},
};
use windlass_testkit::{TempDir, temp_dir};

use crate::postgres::TestDb;

pub(crate) const ADMIN_TOKEN: &str = "admin-token-of-these-tests-0123456789";

/// Directory and database of the servers of one test.
pub(crate) struct ServerFixture {
    pub(crate) dir: TempDir,
    database: Option<TestDb>,
}

impl ServerFixture {
    pub(crate) fn sqlite() -> Self {
        Self { dir: temp_dir("http").unwrap(), database: None }
    }

    pub(crate) async fn postgres() -> Self {
        Self { dir: temp_dir("http").unwrap(), database: Some(TestDb::open().await) }
    }

    pub(crate) fn postgres_on(database: TestDb) -> Self {
        Self { dir: temp_dir("http").unwrap(), database: Some(database) }
    }

    pub(crate) fn is_postgres(&self) -> bool {
        self.database.is_some()
    }

    pub(crate) fn given(&self) -> SettingsSource {
        SettingsSource {
            data_dir: Some(self.dir.path().to_owned()),
            database_url: self.database.as_ref().map(TestDb::url),
            admin_token: Some(ADMIN_TOKEN.into()),
            no_local: Some(true),
            image_lookup: Some("off".into()),
            ..SettingsSource::default()
        }
    }

    pub(crate) async fn start(&self) -> TestServer {
        TestServer::start_with(self.given()).await
    }
}

/// Runs each test, a function of `&ServerFixture`, on both databases.
macro_rules! on_both {
    ($($name:ident)*) => {
        mod sqlite {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    super::$name(&crate::http::ServerFixture::sqlite()).await;
                }
            )*
        }
        mod postgres {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    super::$name(&crate::http::ServerFixture::postgres().await).await;
                }
            )*
        }
    };
}
pub(crate) use on_both;

pub(crate) struct TestServer {
    pub(crate) app: App,
    pub(crate) authority: String,
    /// Address of the TLS port, if there is one.
    pub(crate) encrypted: Option<SocketAddr>,
    /// Address that serves only services, if there is one.
    pub(crate) services: Option<SocketAddr>,
    pub(crate) first_token: Option<String>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl TestServer {
    pub(crate) async fn start_with(mut given: SettingsSource) -> Self {
        given.port = Some(0);
        // These tests cover requests; `pipelines.rs` covers what the pipelines do with them.
        let settings = Settings { pipelines: false, ..Settings::new(given, None).unwrap() };
        Self::start_with_settings(settings).await
    }

    pub(crate) async fn start_with_settings(settings: Settings) -> Self {
        let server = Server::start(settings).await.unwrap();
        let (stop, stopped) = oneshot::channel();
        let app = server.app().clone();
        let authority = server.address().to_string();
        let (encrypted, services) = (server.tls_address(), server.services_address());
        let first_token = server.first_token().map(|token| token.text().to_owned());
        let task = tokio::spawn(server.run(async {
            let _ = stopped.await;
        }));
        Self { app, authority, encrypted, services, first_token, stop, task }
    }

    pub(crate) async fn stop(self) {
        let _ = self.stop.send(());
        self.task.await.unwrap();
    }

    /// Grants a backend to the project, even one that only a test has.
    pub(crate) async fn grant(&self, project: &str, backend: &str) {
        let sql = "SELECT id FROM projects WHERE name = $1 AND NOT deleted";
        let found = self.app.db().query_opt(sql, vec![project.into()]).await.unwrap().unwrap();
        let grant = backends::grant(self.app.db().new_id().unwrap(), found.id(0).unwrap(), backend);
        self.app.db().write(Unit::new().and([grant])).await.unwrap().done().unwrap();
    }

    /// Posts as the admin.
    pub(crate) async fn admin(&self, path: &str, body: Value) -> Value {
        self.ok(ADMIN_TOKEN, path, body).await
    }

    /// Posts, and expects 200.
    #[track_caller]
    pub(crate) fn ok<'a>(
        &'a self,
        token: &'a str,
        path: &'a str,
        body: Value,
    ) -> impl Future<Output = Value> + 'a {
        let from = std::panic::Location::caller();
        async move {
            let (status, answer) = self.post(token, path, &body.to_string()).await;
            assert_eq!(status, 200, "{path} at {from}: {answer}");
            answer
        }
    }

    /// Posts, expects a 400 with this code, and returns its message.
    #[track_caller]
    pub(crate) fn refused<'a>(
        &'a self,
        token: &'a str,
        path: &'a str,
        body: Value,
        code: &'a str,
    ) -> impl Future<Output = String> + 'a {
        let from = std::panic::Location::caller();
        async move {
            let (status, answer) = self.post(token, path, &body.to_string()).await;
            assert_eq!(status, 400, "{path} at {from}: {answer}");
            let detail = answer["detail"].as_array().expect("a list");
            assert_eq!(detail.len(), 1, "at {from}");
            assert_eq!(detail[0]["code"], code, "at {from}: {answer}");
            let known = ["code", "msg", "fields"];
            assert!(detail[0].as_object().unwrap().keys().all(|key| known.contains(&key.as_str())));
            detail[0]["msg"].as_str().unwrap().to_owned()
        }
    }

    /// Posts an arbitrary body.
    pub(crate) async fn post(&self, token: &str, path: &str, body: &str) -> (u16, Value) {
        let request = Request::post(path)
            .header("host", &self.authority)
            .header("content-type", "application/json")
            .header("authorization", format!("Bearer {token}"))
            .body(Full::new(Bytes::from(body.to_owned())))
            .unwrap();
        let (status, body) = self.send(request).await;
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    pub(crate) async fn get(&self, token: &str, path: &str) -> (u16, Vec<u8>) {
        let request = Request::get(path)
            .header("host", &self.authority)
            .header("authorization", format!("Bearer {token}"))
            .body(Full::new(Bytes::new()))
            .unwrap();
        self.send(request).await
    }

    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> (u16, Vec<u8>) {
        let stream = TcpStream::connect(&self.authority).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        // These feeds do not end: their first message is returned.
        let is_feed = ["/api/changes/stream", "/api/metrics/stream"].contains(&request.uri().path());
        let response = sender.send_request(request).await.unwrap();
        let status = response.status().as_u16();
        if is_feed && status == 200 {
            let first = response.into_body().frame().await.unwrap().unwrap();
            return (status, first.into_data().unwrap_or_default().to_vec());
        }
        (status, response.into_body().collect().await.unwrap().to_bytes().to_vec())
    }

    /// Posts one file as multipart.
    pub(crate) async fn upload(&self, token: &str, path: &str, name: &str, content: &[u8]) -> (u16, Value) {
        let mut body = format!(
            "--b0undary\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\r\n"
        )
        .into_bytes();
        body.extend_from_slice(content);
        body.extend_from_slice(b"\r\n--b0undary--\r\n");
        let request = Request::post(path)
            .header("host", &self.authority)
            .header("content-type", "multipart/form-data; boundary=b0undary")
            .header("authorization", format!("Bearer {token}"))
            .body(Full::new(Bytes::from(body)))
            .unwrap();
        let (status, body) = self.send(request).await;
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    /// Adds a user and returns the token.
    pub(crate) async fn user(&self, name: &str) -> String {
        let body = json!({ "username": name, "global_role": "user" });
        let user = self.admin("/api/users/create", body).await;
        user["creds"]["token"].as_str().unwrap().to_owned()
    }

    /// Adds a user who may use the container queue and returns the token.
    pub(crate) async fn create_queue_user(&self, name: &str) -> String {
        let body = json!({ "username": name, "global_role": "user", "can_use_queue": true });
        let user = self.admin("/api/users/create", body).await;
        user["creds"]["token"].as_str().unwrap().to_owned()
    }

    /// Adds users to a project in addition to the present members.
    pub(crate) async fn join(&self, project: &str, members: &[(&str, &str)]) {
        let members: Vec<Value> =
            members.iter().map(|(name, role)| json!({ "username": name, "project_role": role })).collect();
        self.admin(&format!("/api/projects/{project}/add_members"), json!({ "members": members })).await;
    }
}
