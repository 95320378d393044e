//! What stands between callers and the replicas of a service: how they are replaced, how requests are spread over them,
//! and which pages may call.

use super::{
    decode::{Ctx, Int},
    error::{Code, Diagnosis},
    table::{table, words},
    traffic::Text,
    units::Seconds,
    yaml::Node,
};

table! {
    /// How replicas are replaced by those of a changed configuration.
    pub struct Deployment {
        /// Replicas above the wanted number while it lasts.
        pub surge: Int<0, 1000> = Int(1),
        /// Replicas below the wanted number while it lasts.
        pub unavailable: Int<0, 1000> = Int(0),
        /// How long a new replica that runs may take to get ready.
        pub ready_within: Seconds = Seconds(600),
        /// Goes back to the former configuration when new replicas fail, or do not get ready in time.
        pub rollback: bool = true,
    }
    check = Self::check;
}

impl Deployment {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        if self.surge.get() == 0 && self.unavailable.get() == 0 {
            let message = "with neither `surge` nor `unavailable` no replica could ever be replaced";
            cx.conflict(node, "surge", message);
        }
        if self.ready_within.0 == 0 {
            let message = "`ready_within` must be at least 1s";
            cx.problem(
                Diagnosis::new(Code::OutOfRange, node.key_span("ready_within"), message).at("ready_within"),
            );
        }
    }
}

words! {
    /// Which replica gets the next request.
    pub enum Balance {
        /// One after the other.
        RoundRobin = "round-robin",
        /// The one with the fewest unanswered requests.
        LeastOutstanding = "least-outstanding",
    }
}

table! {
    /// Which pages of other origins may call the service from a browser.
    pub struct Cors {
        /// Origins such as `https://example.org`; all of them when empty.
        pub origins: Vec<Text<255>> = vec![],
        /// Cookies and credentials may be sent along; only for listed origins.
        pub credentials: bool = false,
        /// How long a browser may remember the answer.
        pub max_age: Seconds = Seconds(600),
    }
    check = Self::check;
}

impl Cors {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        if self.credentials && self.origins.is_empty() {
            cx.conflict(node, "credentials", "`credentials` needs `origins`: not every page may have them");
        }
        let is_origin = |origin: &str| {
            origin.split_once("://").is_some_and(|(scheme, rest)| {
                !scheme.is_empty() && !rest.is_empty() && !rest.contains(['/', '*', ' '])
            })
        };
        if let Some(wrong) = self.origins.iter().find(|origin| !is_origin(&origin.0)) {
            let message = format!("`{}` is not an origin such as https://example.org", wrong.0);
            cx.problem(Diagnosis::new(Code::InvalidValue, node.key_span("origins"), message).at("origins"));
        }
    }
}
