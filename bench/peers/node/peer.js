// A job queue behind Express.
//
//   node peer.js bull|bullmq SOCKET serve|JOBS              SOCKET is Redis' Unix socket
//   node peer.js pg-boss|graphile-worker URL serve|JOBS     URL is a Postgres database
//
// With "serve", the program prints its address and an empty line, and stores the message of each POST before it answers.
// When its standard input ends, it prints the number of stored jobs. With JOBS, it inserts that many jobs, works them
// without doing anything, and prints how many it works per second.
const [, , name, url, mode] = process.argv;
const concurrency = 100;

// Each peer has insert(id, data), count(), and work(done), which calls done after each job.
const peers = {
  async bull() {
    const { default: Queue } = await import("bull");
    const queue = new Queue("default", { redis: { path: url } });
    return {
      insert: (id, data) => queue.add(data, { jobId: id }),
      count: () => queue.count(),
      work: (done) => queue.on("completed", done).process(concurrency, async () => {}),
    };
  },
  async bullmq() {
    const { Queue, Worker } = await import("bullmq");
    const connection = { path: url, maxRetriesPerRequest: null };
    const queue = new Queue("default", { connection });
    return {
      insert: (id, data) => queue.add("job", data, { jobId: "m" + id }), // BullMQ rejects an id that is a number
      count: () => queue.count(),
      work: (done) => new Worker("default", async () => {}, { connection, concurrency }).on("completed", done),
    };
  },
  async "pg-boss"() {
    const { PgBoss } = await import("pg-boss");
    const boss = new PgBoss({ connectionString: url, max: 20 });
    await boss.start();
    await boss.createQueue("default");
    return {
      insert: (id, data) => boss.insert("default", [{ id: "00000000-0000-4000-8000-" + id.slice(-12), data }]),
      count: () => boss.getDb().executeSql("SELECT count(*)::int AS n FROM pgboss.job").then((r) => r.rows[0].n),
      work(done) {
        // boss.work polls at most twice a second; these are the calls that it makes.
        const loop = async () => {
          for (;;) {
            const jobs = await boss.fetch("default", { batchSize: 500 });
            if (jobs.length === 0) return;
            await boss.complete("default", jobs.map((job) => job.id));
            jobs.forEach(done);
          }
        };
        for (let i = 0; i < 4; i++) loop();
      },
    };
  },
  async "graphile-worker"() {
    const { makeWorkerUtils, run, Logger } = await import("graphile-worker");
    const logger = new Logger(() => () => {});
    const utils = await makeWorkerUtils({ connectionString: url, maxPoolSize: 20, logger });
    await utils.migrate();
    return {
      insert: (id, data) => utils.addJob("job", data, { jobKey: id }),
      count: () => utils.withPgClient((pg) => pg.query("SELECT count(*)::int AS n FROM graphile_worker.jobs"))
        .then((r) => r.rows[0].n),
      async work(done) {
        const runner = await run({
          taskList: { job: async () => {} }, noHandleSignals: true,
          preset: { worker: {
            connectionString: url, maxPoolSize: 20, logger, concurrentJobs: concurrency, localQueue: { size: 500 },
            completeJobBatchDelay: 0,
          } },
        });
        runner.events.on("job:complete", done);
      },
    };
  },
};

const peer = await peers[name]();
if (mode === "serve") {
  const { default: express } = await import("express");
  const app = express();
  app.post("/api/messages", express.json(), async (request, response) => {
    await peer.insert(request.body.messageId, request.body);
    response.status(202).json({ messageId: request.body.messageId });
  });
  const server = app.listen(0, "127.0.0.1", () => console.log(`127.0.0.1:${server.address().port}\n`));
  process.stdin.on("end", async () => {
    console.log(String(await peer.count()));
    process.exit();
  }).resume();
} else {
  const jobs = Number(mode);
  const data = { blob: "x".repeat(900) };
  let next = 1e12;
  await Promise.all(Array.from({ length: concurrency }, async () => {
    while (next < 1e12 + jobs) await peer.insert(String(++next), data);
  }));
  let worked = 0;
  const start = performance.now();
  peer.work(() => {
    if (++worked === jobs) {
      console.log((jobs / (performance.now() - start)) * 1000);
      process.exit();
    }
  });
}
