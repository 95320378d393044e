//! The road to the server: slow at times, lossy at times, and whoever dies on it has still been heard.

use axum::{Router, body::Body};
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, body::Bytes};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::{Instant, sleep};
use tower::ServiceExt as _;
use windlass_api::queue::{Carried, Carry, QueueError};
use windlass_model::dispatch::Attempt;

use super::{Locked, SharedWorld};
use crate::rng::Rng;

/// In percent.
const LOST: u64 = 2;
const UNANSWERED: u64 = 2;
const SLOW: u64 = 5;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Traveller {
    /// Nothing happens to these on the road.
    Person,
    Dispatcher(usize),
    Executor,
}

pub(super) struct Road {
    router: Router,
    world: SharedWorld,
    rng: Mutex<Rng>,
    who: Traveller,
}

/// What was asked, for those who watch.
struct Call {
    method: String,
    path: String,
    query: String,
    body: Value,
}

impl Call {
    fn of(request: &Request<Full<Bytes>>, body: &Bytes) -> Self {
        let uri = request.uri();
        Self {
            method: request.method().to_string(),
            path: uri.path().trim_start_matches("/arvados/v1/").to_owned(),
            query: uri.query().unwrap_or_default().to_owned(),
            body: serde_json::from_slice(body).unwrap_or_default(),
        }
    }

    /// The container that is to be locked.
    fn locks(&self) -> Option<&str> {
        self.path.strip_prefix("containers/")?.strip_suffix("/lock")
    }

    /// The attempt that a dispatcher gives up, and what it says why.
    fn gives_up(&self) -> Option<(Attempt, &str)> {
        let rest = self.path.strip_prefix("containers/")?;
        if let Some(uuid) = rest.strip_suffix("/unlock") {
            let number = self.query.split('&').find_map(|pair| pair.strip_prefix("attempt="))?;
            return Some((Attempt { uuid: uuid.to_owned(), number: number.parse().ok()? }, "unlock"));
        }
        let change = &self.body["container"];
        if self.method != "PUT" || change["state"] != "Cancelled" {
            return None;
        }
        let number = change["attempt"].as_u64()?;
        Some((Attempt { uuid: rest.to_owned(), number }, change["runtime_status"]["reason"].as_str()?))
    }
}

impl Road {
    pub(super) fn new(router: Router, world: SharedWorld, rng: Rng, who: Traveller) -> Self {
        Self { router, world, rng: Mutex::new(rng), who }
    }

    fn roll(&self, percent: u64, fault: &'static str) -> bool {
        let hit = self.who != Traveller::Person && self.rng.lock().chance(percent);
        if hit {
            self.world.lock().fire(fault);
        }
        hit
    }

    async fn travel(&self) {
        if self.who == Traveller::Person {
            return;
        }
        let most = if self.roll(SLOW, "slow call") { 3_000 } else { 20 };
        let time = self.rng.lock().millis(1, most);
        sleep(time).await;
    }

    async fn bring(&self, request: Request<Full<Bytes>>) -> Result<(u16, Bytes), QueueError> {
        let (head, body) = request.into_parts();
        let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        let request = Request::from_parts(head, Full::new(body.clone()));
        let call = Call::of(&request, &body);
        self.travel().await;
        let is_overloaded = {
            let mut world = self.world.lock();
            world.calls += 1;
            let is = world.overloaded_until.is_some_and(|until| Instant::now() < until);
            if is && self.who != Traveller::Person {
                world.fire("server overloaded");
            }
            is && self.who != Traveller::Person
        };
        if is_overloaded {
            self.miss(&call);
            return Ok((503, Bytes::from_static(br#"{"errors":["overloaded"]}"#)));
        }
        if self.roll(LOST, "lost request") {
            self.miss(&call);
            return Err(QueueError::Silent);
        }
        let router = self.router.clone();
        // A task of its own: a server goes on when whoever asked is gone.
        let (world, who) = (self.world.clone(), self.who);
        let answered = tokio::spawn(async move {
            let (head, body) = request.into_parts();
            let answer = match router.oneshot(Request::from_parts(head, Body::new(body))).await {
                Ok(answer) => answer,
                Err(never) => match never {},
            };
            let status = answer.status().as_u16();
            let body = answer.into_body().collect().await.map(http_body_util::Collected::to_bytes);
            witness(&world, who, &call, status);
            (status, body.unwrap_or_default(), call)
        });
        let Ok((status, body, call)) = answered.await else { return Err(QueueError::Silent) };
        if self.roll(UNANSWERED, "lost answer") {
            self.miss(&call);
            return Err(QueueError::Silent);
        }
        self.travel().await;
        Ok((status, body))
    }

    fn miss(&self, call: &Call) {
        if let (Traveller::Dispatcher(at), Some(uuid)) = (self.who, call.locks()) {
            self.world.lock().missed.push((at, uuid.to_owned(), Instant::now()));
        }
    }
}

/// What is wrong the moment it happens.
fn witness(world: &SharedWorld, who: Traveller, call: &Call, status: u16) {
    let Traveller::Dispatcher(at) = who else { return };
    if status != 200 {
        return;
    }
    let mut world = world.lock();
    if let Some(uuid) = call.locks() {
        let alive = world.pools[at].alive();
        let locked = Locked { dispatcher: at, uuid: uuid.to_owned(), at: Instant::now(), alive };
        world.locks.push(locked);
    }
    if let Some((attempt, why)) = call.gives_up() {
        if world.pools[at].is_known_alive(&attempt) {
            world.violate("C12", format!("{attempt} was given up ({why}) while its job lives"));
        }
        if why == "abandoned" && !world.pools[at].was_whole {
            world.violate("R15", format!("{attempt} was called abandoned while a worker was unknown"));
        }
    }
}

impl Carry for Road {
    fn carry(&self, request: Request<Full<Bytes>>) -> Carried<'_> {
        Box::pin(self.bring(request))
    }
}
