//! Lists of the container queue as clients request them: filters, order, pages.
//!
//! Attributes are either columns or parts of the document. Names in the SQL come only from the tables here; all client
//! input is a parameter.

use serde_json::Value;
use windlass_model::{plan::queue_order, time::Timestamp};

use super::{Db, DbError, Dialect, Row, Val, filter::Filter};

/// Kind of list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListKind {
    Containers,
    Requests,
    Logs,
}

/// Rows that a caller can see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueVisibility {
    All,
    /// Rows of this user.
    Owner(String),
    /// Only this container.
    One(String),
    /// Rows that the program in this container needs: its own container and request, the requests that it made, and
    /// their containers.
    Inside(String),
}

/// Condition for containers of requests that a container made.
const IS_REQUESTED_BY_CONTAINER: &str = "IN (SELECT r.container_uuid FROM container_requests r \
     WHERE r.requesting_container_uuid = ? AND r.container_uuid IS NOT NULL)";

#[derive(Clone, Debug, PartialEq)]
pub struct Condition {
    pub attribute: String,
    pub op: String,
    pub operand: Value,
}

#[derive(Clone, Debug, Default)]
pub struct ListQuery {
    pub conditions: Vec<Condition>,
    /// Attribute, and whether it descends.
    pub order: Vec<(String, bool)>,
    pub limit: i64,
    pub offset: i64,
    pub count: bool,
}

#[derive(Debug)]
pub struct ListPage {
    /// Documents; for logs, with their id and the columns next to them.
    pub rows: Vec<Row>,
    pub available: Option<i64>,
}

#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// The client's request is invalid.
    #[error("{0}")]
    Requested(String),
    #[error(transparent)]
    Db(#[from] DbError),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AttributeType {
    Text,
    Int,
    Real,
    Time,
    Json,
}

/// Columns, and parts of the document. Times in the document are text that sorts correctly.
fn attribute(kind: ListKind, name: &str) -> Option<(AttributeType, bool)> {
    use AttributeType::{Int, Json, Real, Text, Time};
    let found = match kind {
        ListKind::Containers => match name {
            "uuid" | "owner_uuid" | "state" | "locked_by_uuid" => (Text, true),
            "priority" => (Int, true),
            "created_at" | "modified_at" => (Time, true),
            "auth_uuid"
            | "cwd"
            | "container_image"
            | "output_path"
            | "output"
            | "log"
            | "runtime_user_uuid"
            | "modified_by_user_uuid"
            | "scheduling_status"
            | "gateway_address" => (Text, false),
            "attempt" | "lock_count" | "exit_code" => (Int, false),
            "progress" | "cost" | "subrequests_cost" => (Real, false),
            "started_at" | "finished_at" => (Time, false),
            "environment"
            | "mounts"
            | "runtime_constraints"
            | "scheduling_parameters"
            | "runtime_status"
            | "output_properties" => (Json, false),
            _ => return None,
        },
        ListKind::Requests => match name {
            "uuid" | "owner_uuid" | "state" | "container_uuid" | "requesting_container_uuid" => (Text, true),
            "priority" => (Int, true),
            "created_at" | "modified_at" => (Time, true),
            "name"
            | "description"
            | "cwd"
            | "container_image"
            | "output_path"
            | "output_name"
            | "output_uuid"
            | "log_uuid"
            | "modified_by_user_uuid" => (Text, false),
            "container_count" | "container_count_max" | "output_ttl" => (Int, false),
            "cumulative_cost" => (Real, false),
            "properties" | "environment" | "mounts" | "runtime_constraints" | "scheduling_parameters" => {
                (Json, false)
            }
            _ => return None,
        },
        ListKind::Logs => match name {
            "id" => (Int, true),
            "uuid" | "object_uuid" | "object_owner_uuid" | "event_type" | "summary" => (Text, true),
            "created_at" | "modified_at" | "event_at" => (Time, true),
            "properties" => (Json, false),
            _ => return None,
        },
    };
    Some(found)
}

/// Order attribute that lists the first containers of every owner before the second of any, so that a page contains
/// some of each: overdue ones first, then by priority and age. An owner is the project of a run, or a user.
pub const TURN: &str = "turn";

fn turn_expression() -> String {
    let overdue = queue_order::OVERDUE_AFTER.0;
    format!(
        "row_number() OVER (PARTITION BY coalesce((SELECT j.project_id FROM jobs j WHERE j.id = t.job_id), t.owner_uuid) \
         ORDER BY CASE WHEN t.created_at <= now_us() - {overdue} THEN 0 ELSE 1 END, t.priority DESC, t.created_at, t.uuid)"
    )
}

struct ListBuilder<'a> {
    kind: ListKind,
    dialect: Dialect,
    filter: Filter,
    requested: &'a ListQuery,
}

/// Rows that match the request and that the caller can see.
pub async fn list(
    db: &Db,
    kind: ListKind,
    sight: &QueueVisibility,
    requested: &ListQuery,
) -> Result<ListPage, ListError> {
    let mut list = ListBuilder { kind, dialect: db.dialect(), filter: Filter::new(), requested };
    list.restrict(sight);
    for condition in &requested.conditions {
        list.add_condition(condition)?;
    }
    let order = list.order()?;
    let (table, columns) = match kind {
        ListKind::Containers => ("containers", "t.doc"),
        ListKind::Requests => ("container_requests", "t.doc"),
        ListKind::Logs => (
            "queue_logs",
            "t.doc, t.id, t.uuid, t.object_uuid, t.object_owner_uuid, t.event_type, t.created_at, t.summary",
        ),
    };
    let (condition, params) = list.filter.done();
    let available = if requested.count {
        let sql = format!("SELECT count(*) FROM {table} t{condition}");
        Some(db.query_opt(sql, params.clone()).await?.map_or(Ok(0), |row| row.int(0))?)
    } else {
        None
    };
    let rows = if requested.limit == 0 {
        Vec::new()
    } else {
        let (limit, offset) = (requested.limit.max(0), requested.offset.max(0));
        let sql = format!("SELECT {columns} FROM {table} t{condition}{order} LIMIT {limit} OFFSET {offset}");
        db.query(sql, params).await?
    };
    Ok(ListPage { rows, available })
}

fn invalid_query<T>(why: impl Into<String>) -> Result<T, ListError> {
    Err(ListError::Requested(why.into()))
}

impl ListBuilder<'_> {
    fn restrict(&mut self, sight: &QueueVisibility) {
        match (sight, self.kind) {
            (QueueVisibility::All, _) => {}
            (QueueVisibility::Owner(owner), ListKind::Containers | ListKind::Requests) => {
                self.filter.is("t.owner_uuid = ?", owner.as_str());
            }
            (QueueVisibility::Owner(owner), ListKind::Logs) => {
                self.filter.is("t.object_owner_uuid = ?", owner.as_str())
            }
            (QueueVisibility::One(uuid), ListKind::Containers) => self.filter.is("t.uuid = ?", uuid.as_str()),
            (QueueVisibility::One(uuid), ListKind::Logs) => {
                self.filter.is("t.object_uuid = ?", uuid.as_str())
            }
            (QueueVisibility::One(_), ListKind::Requests) => self.filter.and("FALSE"),
            (QueueVisibility::Inside(uuid), ListKind::Containers) => {
                self.filter.is(&format!("(t.uuid = ? OR t.uuid {IS_REQUESTED_BY_CONTAINER})"), uuid.as_str());
            }
            (QueueVisibility::Inside(uuid), ListKind::Requests) => {
                self.filter.is("(t.requesting_container_uuid = ? OR t.container_uuid = ?)", uuid.as_str());
            }
            (QueueVisibility::Inside(uuid), ListKind::Logs) => {
                let seen = format!(
                    "(t.object_uuid = ? OR t.object_uuid {IS_REQUESTED_BY_CONTAINER} OR t.object_uuid IN \
                     (SELECT r.uuid FROM container_requests r WHERE r.requesting_container_uuid = ?))"
                );
                self.filter.is(&seen, uuid.as_str());
            }
        }
    }

    /// SQL expression of an attribute, and its type.
    fn expression(&mut self, name: &str) -> Result<(String, AttributeType), ListError> {
        if self.kind == ListKind::Requests
            && let Some(of) = name.strip_prefix("container.")
        {
            let inner = attribute(ListKind::Containers, of).filter(|(_, is_column)| *is_column);
            let Some((kind, _)) = inner else { return invalid_query(format!("unknown attribute `{name}`")) };
            return Ok((format!("(SELECT c.{of} FROM containers c WHERE c.uuid = t.container_uuid)"), kind));
        }
        // A name of the first version of this API.
        let name = match (self.kind, name) {
            (ListKind::Containers, "dispatch_auth_uuid") => "locked_by_uuid",
            (ListKind::Logs, "event_at" | "modified_at") => "created_at",
            (_, name) => name,
        };
        if let Some((kind, is_column)) = attribute(self.kind, name) {
            if is_column {
                return Ok((format!("t.{name}"), kind));
            }
            let text = match self.dialect {
                Dialect::Sqlite => format!("json_extract(t.doc, '$.{name}')"),
                Dialect::Postgres => format!("(CAST(t.doc AS jsonb) ->> '{name}')"),
            };
            return Ok(match (kind, self.dialect) {
                (AttributeType::Int, Dialect::Postgres) => (format!("CAST({text} AS BIGINT)"), kind),
                (AttributeType::Real, Dialect::Postgres) => {
                    (format!("CAST({text} AS DOUBLE PRECISION)"), kind)
                }
                // Stored as text in a fixed format.
                (AttributeType::Time, _) => (text, AttributeType::Text),
                (AttributeType::Text | AttributeType::Int | AttributeType::Real | AttributeType::Json, _) => {
                    (text, kind)
                }
            });
        }
        if let Some((of, key)) = name.split_once('.')
            && matches!(attribute(self.kind, of), Some((AttributeType::Json, _)))
        {
            return Ok((self.part(of, key)?, AttributeType::Text));
        }
        invalid_query(format!("unknown attribute `{name}`"))
    }

    /// Value in an object of the document, as text.
    fn part(&mut self, of: &str, key: &str) -> Result<String, ListError> {
        if key.contains('"') {
            return invalid_query(format!("invalid key `{key}`"));
        }
        Ok(match self.dialect {
            Dialect::Sqlite => {
                let path = self.filter.bind(format!("$.{of}.\"{key}\""));
                format!("CAST(json_extract(t.doc, {path}) AS TEXT)")
            }
            Dialect::Postgres => {
                let key = self.filter.bind(key);
                format!("(CAST(t.doc AS jsonb) -> '{of}' ->> CAST({key} AS TEXT))")
            }
        })
    }

    fn operand(kind: AttributeType, value: &Value) -> Result<Val, ListError> {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Number(number) => number.to_string(),
            Value::Bool(flag) => flag.to_string(),
            Value::Null | Value::Array(_) | Value::Object(_) => {
                return invalid_query(format!("cannot compare with {value}"));
            }
        };
        let bad = || ListError::Requested(format!("cannot compare with {value}"));
        Ok(match kind {
            AttributeType::Text | AttributeType::Json => text.into(),
            AttributeType::Int => match text.parse::<i64>() {
                Ok(number) => number.into(),
                // Numbers too large for a column compare as the largest.
                Err(_) => {
                    let real: f64 = text.parse().map_err(|_| bad())?;
                    #[expect(clippy::cast_possible_truncation, reason = "saturates")]
                    let whole = real as i64;
                    whole.into()
                }
            },
            AttributeType::Real => text.parse::<f64>().map_err(|_| bad())?.into(),
            AttributeType::Time => Timestamp::parse(&text).map_err(|_| bad())?.into(),
        })
    }

    /// Placeholder of an operand. Postgres needs its type.
    fn bind(&mut self, kind: AttributeType, value: &Value) -> Result<String, ListError> {
        let place = self.filter.bind(Self::operand(kind, value)?);
        let sort = match kind {
            AttributeType::Text | AttributeType::Json => "TEXT",
            AttributeType::Int | AttributeType::Time => "BIGINT",
            AttributeType::Real => "DOUBLE PRECISION",
        };
        Ok(format!("CAST({place} AS {sort})"))
    }

    fn add_condition(&mut self, condition: &Condition) -> Result<(), ListError> {
        let Condition { attribute: name, op, operand } = condition;
        if op == "exists" || op == "contains" {
            return self.add_object_condition(condition);
        }
        let (expression, kind) = self.expression(name)?;
        let text = match (op.as_str(), operand) {
            ("=", Value::Null) => format!("{expression} IS NULL"),
            ("!=" | "<>", Value::Null) => format!("{expression} IS NOT NULL"),
            ("=" | "<" | "<=" | ">" | ">=", _) => format!("{expression} {op} {}", self.bind(kind, operand)?),
            ("!=" | "<>", _) => {
                format!("({expression} IS NULL OR {expression} <> {})", self.bind(kind, operand)?)
            }
            ("in" | "not in", Value::Array(items)) => {
                let mut places = Vec::new();
                for item in items.iter().filter(|item| !item.is_null()) {
                    places.push(self.bind(kind, item)?);
                }
                let nothing = items.iter().any(Value::is_null);
                let within = if places.is_empty() {
                    "FALSE".to_owned()
                } else {
                    format!("{expression} IN ({})", places.join(", "))
                };
                let within = if nothing { format!("({within} OR {expression} IS NULL)") } else { within };
                if op == "in" { within } else { format!("(NOT coalesce({within}, FALSE))") }
            }
            ("like", Value::String(_)) => {
                format!("{expression} LIKE {}", self.bind(AttributeType::Text, operand)?)
            }
            ("ilike", Value::String(_)) => {
                format!("lower({expression}) LIKE lower({})", self.bind(AttributeType::Text, operand)?)
            }
            ("is_a", _) => self.is_a(&expression, operand)?,
            _ => return invalid_query(format!("unsupported operator `{op}` for {operand}")),
        };
        self.filter.and(&text);
        Ok(())
    }

    fn is_a(&mut self, expression: &str, operand: &Value) -> Result<String, ListError> {
        let kinds: Vec<&str> = match operand {
            Value::String(kind) => vec![kind.as_str()],
            Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => Vec::new(),
        };
        let mut parts = vec!["FALSE".to_owned()];
        for kind in kinds {
            let infix = match kind {
                "arvados#container" => "dz642",
                "arvados#containerRequest" => "xvhdp",
                "arvados#log" => "57u5n",
                "arvados#user" => "tpzed",
                _ => continue,
            };
            let pattern = self.filter.bind(format!("_____-{infix}-%"));
            parts.push(format!("{expression} LIKE CAST({pattern} AS TEXT)"));
        }
        Ok(format!("({})", parts.join(" OR ")))
    }

    fn add_object_condition(&mut self, condition: &Condition) -> Result<(), ListError> {
        let Condition { attribute: name, op, operand } = condition;
        if !matches!(attribute(self.kind, name), Some((AttributeType::Json, _))) {
            return invalid_query(format!("`{op}` requires an object, and `{name}` is not one"));
        }
        match (op.as_str(), operand) {
            ("exists", Value::String(key)) => {
                let part = self.part(name, key)?;
                self.filter.and(&format!("{part} IS NOT NULL"));
            }
            ("contains", Value::Object(wanted)) => {
                for (key, value) in wanted {
                    let part = self.part(name, key)?;
                    let place = self.bind(AttributeType::Text, value)?;
                    self.filter.and(&format!("{part} = {place}"));
                }
            }
            _ => return invalid_query(format!("unsupported operator `{op}` for {operand}")),
        }
        Ok(())
    }

    fn order(&mut self) -> Result<String, ListError> {
        let mut parts = Vec::new();
        let mut is_whole = false;
        let standard = [("modified_at".to_owned(), true)];
        let requested = if self.requested.order.is_empty() { &standard[..] } else { &self.requested.order };
        for (name, descends) in requested {
            let expression = match (self.kind, name.as_str()) {
                (ListKind::Containers, TURN) => turn_expression(),
                _ => self.expression(name)?.0,
            };
            is_whole |= name == "uuid" || name == "id";
            parts.push(format!("{expression} {}", if *descends { "DESC" } else { "ASC" }));
        }
        if !is_whole {
            parts.push("t.uuid ASC".to_owned());
        }
        Ok(format!(" ORDER BY {}", parts.join(", ")))
    }
}
