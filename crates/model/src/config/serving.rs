//! Serving of a service: replacement of replicas, load balancing and CORS.

use super::{
    config_macros::{table, words},
    decode::{Ctx, Int},
    error::{Code, Diagnosis},
    quantities::Seconds,
    traffic::Text,
    yaml::Node,
};

table! {
    /// Rules for replacing replicas by those of a changed configuration.
    pub struct Deployment {
        /// Maximum number of replicas above the target during a deployment.
        pub surge: Int<0, 1000> = Int(1),
        /// Maximum number of replicas below the target during a deployment.
        pub unavailable: Int<0, 1000> = Int(0),
        /// Time that a new running replica has to become ready.
        pub ready_within: Seconds = Seconds(600),
        /// Returns to the previous configuration if new replicas fail or do not become ready in time.
        pub rollback: bool = true,
    }
    check = Self::check;
}

impl Deployment {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        if self.surge.get() == 0 && self.unavailable.get() == 0 {
            let message = "`surge` and `unavailable` must not both be 0: no replica could be replaced";
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
    /// Selection of the replica for the next request.
    pub enum Balance {
        /// Each replica in turn.
        RoundRobin = "round-robin",
        /// The replica with the fewest outstanding requests.
        LeastOutstanding = "least-outstanding",
    }
}

table! {
    /// Origins whose web pages may call the service from a browser.
    pub struct Cors {
        /// Origins such as `https://example.org`; all origins if empty.
        pub origins: Vec<Text<255>> = vec![],
        /// Allows cookies and credentials; only for listed origins.
        pub credentials: bool = false,
        /// Time for which a browser may cache the answer.
        pub max_age: Seconds = Seconds(600),
    }
    check = Self::check;
}

impl Cors {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        if self.credentials && self.origins.is_empty() {
            cx.conflict(node, "credentials", "`credentials` requires a list of `origins`");
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
