//! Rows with documents that cannot be read: an error names the table and the row, and other rows are not affected.

use serde_json::{Value, json};
use windlass_server::{db::Val, params};
use windlass_testkit::wait::eventually_async;

use crate::{
    http::{ADMIN_TOKEN, ServerFixture, on_both},
    job_test_env::JobTestEnv,
    quotas::finish,
};

on_both! {
    a_document_that_cannot_be_read_is_an_error_with_its_table_and_its_row
    a_pipeline_leaves_a_row_that_it_cannot_read_until_later
    a_waiting_job_that_cannot_be_read_does_not_hold_up_the_others
}

const BROKEN: &str = r#"{"secret-text": "#;

/// The id and a document of the only row of a table.
async fn only_row(env: &JobTestEnv, table: &str, column: &str) -> (String, Val) {
    let sql = format!("SELECT id, {column} FROM {table}");
    let rows = env.server.app.db().query(sql, vec![]).await.unwrap();
    assert_eq!(rows.len(), 1, "{table}");
    (rows[0].text(0).unwrap(), rows[0].opt_text(1).unwrap().into())
}

async fn replace(env: &JobTestEnv, table: &str, column: &str, value: Val) {
    env.write(&format!("UPDATE {table} SET {column} = $1"), params![value]).await;
}

async fn message_of_500(env: &JobTestEnv, url: &str, body: &Value) -> String {
    let (status, response) = env.server.post(ADMIN_TOKEN, url, &body.to_string()).await;
    assert_eq!(status, 500, "{url}: {response}");
    response["detail"]["msg"].as_str().unwrap().to_owned()
}

async fn a_document_that_cannot_be_read_is_an_error_with_its_table_and_its_row(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.apply("first", json!({})).await;
    env.wait_for_job("first", "running").await;
    let (run, none) = (json!({"run_name": "first"}), json!({}));
    let runs = "/api/project/main/runs/get";
    let places = [
        ("runs", "spec", runs, &run),
        ("jobs", "job_spec", runs, &run),
        ("jobs", "provisioning", runs, &run),
        ("jobs", "runtime", runs, &run),
        ("instances", "instance_type", "/api/instances/list", &none),
        ("fleets", "spec", "/api/project/main/fleets/list", &none),
    ];
    for (table, column, url, body) in places {
        let (id, before) = only_row(&env, table, column).await;
        replace(&env, table, column, BROKEN.into()).await;
        let message = message_of_500(&env, url, body).await;
        let expected =
            format!("the document in column `{column}` of table `{table}`, row {id}, cannot be read");
        assert!(message.starts_with(&expected), "{message}");
        assert!(!message.contains("secret-text"), "{message}");
        replace(&env, table, column, before).await;
        env.server.admin(url, body.clone()).await;
    }
    env.end().await;
}

async fn a_pipeline_leaves_a_row_that_it_cannot_read_until_later(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    let (_, before) = only_row(&env, "instances", "offer").await;
    env.write("UPDATE instances SET offer = $1, due_at = NULL", params![BROKEN]).await;
    eventually_async("the pass has failed and the row is due later", async || {
        let sql = "SELECT 1 FROM instances WHERE lock_token IS NULL AND due_at > now_us()";
        let rows = env.server.app.db().query(sql, vec![]).await.unwrap();
        (!rows.is_empty()).then_some(())
    })
    .await;
    // It is processed again as soon as it can be read.
    env.write("UPDATE instances SET offer = $1, due_at = NULL, seen_at = NULL", params![before]).await;
    eventually_async("the instance is polled again", async || {
        let sql = "SELECT 1 FROM instances WHERE seen_at IS NOT NULL";
        (!env.server.app.db().query(sql, vec![]).await.unwrap().is_empty()).then_some(())
    })
    .await;
    env.end().await;
}

async fn a_waiting_job_that_cannot_be_read_does_not_hold_up_the_others(ground: &ServerFixture) {
    let env = JobTestEnv::new(ground, 1, 1).await;
    env.apply("first", json!({})).await;
    env.wait_for_job("first", "running").await;
    env.apply("broken", json!({"max_duration": "1h"})).await;
    env.apply("good", json!({"max_duration": "2h"})).await;
    let set = format!("job_spec = '{BROKEN}', due_at = NULL");
    env.write_between_passes("jobs", &set, "status = 'submitted' AND job_spec LIKE '%broken%'").await;
    finish(&env).await;
    env.wait_for_job("good", "running").await;
    let message = message_of_500(&env, "/api/project/main/runs/get", &json!({"run_name": "broken"})).await;
    assert!(message.contains("table `jobs`"), "{message}");
    env.end().await;
}
