package strategy

import (
	"net/http"
	"slices"

	"github.com/dlqd/dlqd/internal/riverdlq"
)

// line is a line of the built-in table: a group of errors with the same class.
//
// names match types and codes, as words and without words such as Error and Exception: "not found" matches
// NotFoundError, NOT_FOUND and Faraday::NotFound. A * stands for any words before or after. A name without * takes
// precedence over names with *.
//
// texts match words of messages, in the given order; … stands for at most six words. Commas separate names and texts. A
// match begins and ends at word boundaries.
type line struct {
	rule  string
	class riverdlq.Class
	names string
	texts string
}

// Names of lines to which the code refers.
const (
	stuckJob  = "stuck-job" // jobs that River's rescuer ended, because their worker died or hung
	rateLimit = "rate-limit"
)

// table is the built-in table. The first line that matches decides, so the specific lines come
// before the general ones.
var table = []line{
	{rule: stuckJob, class: riverdlq.ClassTransient, texts: `stuck job rescued by`},
	{
		rule: "unknown-job-kind", class: riverdlq.ClassCodeBug,
		names: `not registered, unregistered task`,
		texts: `job kind is not registered, unregistered task of type`,
	},

	{
		rule: "nil-dereference", class: riverdlq.ClassCodeBug,
		names: `
			null pointer, null reference, nil pointer, null pointer *, * null pointer, type error, attribute,
			no method`,
		texts: `
			nil pointer, null pointer, invalid memory address, object reference not set to an instance,
			cannot read property, cannot read properties, cannot set property, cannot set properties, is null at,
			undefined is not, null is not an object, is not a function, is not iterable, is not defined,
			has no attribute, nil map, unwrap on a none value, undefined method, undefined local variable,
			undefined array key, undefined index, undefined variable, undefined property, nonetype object,
			call to a member function, call to undefined, because … is null, unexpected null`,
	},
	{
		rule: "code-bug", class: riverdlq.ClassCodeBug,
		names: `
			pickling, missing method, job load, orm invalid argument, eaddrinuse, no such element,
			uninitialized property *, sql syntax, borrow mut, poison error, crossslot, execabort, reference error,
			name error, key error, index error, unbound local, zero division, divide by zero, division by zero,
			arithmetic, assertion error, index out of *, * index out of *, array index *, class cast,
			invalid cast, type assertion, class not found, no class def found, no such method, no such field,
			no such property, module not found, import error, load error, stack overflow, concurrent modification,
			not implemented, not supported, unsupported operation, frozen error, argument count, unhandled match,
			illegal access, illegal operation, abstract method, uninitialized constant, recursion,
			no such bean definition, unsatisfied dependency, bean *, binding resolution, lazy initialization,
			entity manager closed, transient object, transient property value, param validation, wrongtype,
			object disposed, argument null, bad sql grammar, undefined column, undefined function,
			undefined table, in failed sql transaction, template syntax`,
		texts: `
			can't pickle, scan error on column, converting null to, unsupported type, client is closed,
			mismatched types, cannot use a session that has ended, expected … arguments, unwrap on an err value,
			already borrowed, goroutines are asleep, address already in use, database is closed,
			after calling end, write after end, class … not found, trying to access array offset,
			attempt to read property, unsupported operand, must be of type, too few arguments,
			is not a constructor, cannot destructure, before initialization, assignment to constant,
			uninitialized constant, no implicit conversion of, object is not subscriptable,
			object is not callable, object is not iterable, unhashable type, not enough values to unpack,
			too many values to unpack, referenced before assignment, cannot import name, is not json serializable,
			serialization of, allowed memory size, unknown command, cannot access a disposed object,
			goroutine … running, panicked at, fatal error concurrent map, runtime error, segmentation fault,
			index out of range, list index out of range, index … out of bounds, slice bounds out of range,
			division by zero, divided by zero, divide by zero, interface conversion, cannot be cast to,
			is not of type, stack level too deep, maximum call stack size, maximum recursion depth,
			module … not found, cannot find module, no module named, executable file not found, command not found,
			converting circular structure to json, wrong number of arguments,
			missing … required positional argument, unexpected keyword argument, takes … positional arguments,
			unknown delivery tag, wrong kind of value, transaction has already been committed,
			current transaction is aborted, must be provided, cannot be used together, cannot use … together,
			must not set, must not be null, non terminating decimal expansion, char boundary,
			not configured to cascade, already being tracked, concurrent map, must be an array, without an id,
			cannot write datetimeoffset`,
	},
	{
		rule: "sql-bug", class: riverdlq.ClassCodeBug,
		names: `syntax error or access rule violation`,
		texts: `
			no such column, no such table, no such function, unknown column, error in your sql syntax,
			syntax error at or near, invalid column name, invalid object name, column … does not exist,
			function … does not exist`,
	},
	{
		rule: "unauthorized", class: riverdlq.ClassUnauthorized,
		names: `
			missing permission, missing permissions, insufficient access *, authentication failed,
			credential unavailable, * credential unavailable, * credentials, no credentials, credentials *,
			insufficient permission, insufficient permissions, insufficient privilege, insufficient privileges,
			insufficient scope, insufficient scopes, invalid token, invalid * token, invalid access token,
			invalid api key, invalid credentials, invalid signature, invalid client, invalid grant,
			invalid session id, invalid auth, invalid access key id, invalid client token id, invalid password,
			invalid authorization *, missing authentication token, request time too skewed,
			signature does not match, token expired, * token expired, expired token, expired provider token,
			session expired, api key expired, expired signature, signature expired, certificate expired,
			token revoked, missing scope, login required, not authed, unauthorized, * unauthorized,
			unauthorized *, not authorized, * not authorized, unauthenticated, * authentication, authentication *,
			authorization *, * authorization, access denied, * access denied, permission denied,
			* permission denied, permission, * permission, permission mismatch, * permission mismatch,
			unrecognized client, eacces, eperm, cert *, certificate *, * certificate, certificate verify failed,
			ssl cert *, self signed *, depth zero self signed cert, unable to verify leaf signature,
			mismatched credential, sender id mismatch, mismatch sender id, restricted action, auth failure,
			opt in required, * authorization *, unknown authority, unable to get issuer *, account inactive,
			not in channel, org login required, third party auth *, noauth, wrongpass, noperm, auth, tls cert *,
			bad credentials, wrong credentials`,
		texts: `
			x509, ssl certificate problem, local issuer certificate, bad certificate, remote certificate,
			certificate chain, not trusted, hostname mismatch, certificate subject name,
			could not establish trust relationship, could not create ssl tls secure channel,
			authentication failure, public key retrieval is not allowed, is not allowed to connect,
			missing permissions, unauthorized, unauthorised, unauthenticated, authentication failed,
			failed to authenticate, could not authenticate, successfully authenticate, authentication credentials,
			authorization failed, permission denied, access denied, access is denied, insufficient permission,
			insufficient permissions, invalid token, token is invalid, token expired, token has expired,
			expired token, jwt expired, signature has expired, invalid signature, signature verification failed,
			unable to verify the first certificate, does not match certificate, invalid username password,
			access refused, invalid credentials, bad credentials, invalid api key, incorrect api key,
			password authentication failed, login failed for user, pg hba conf, unknown authority,
			certificate verify failed, certificate has expired, certificate signed by, self signed certificate,
			failed to verify certificate, pkix path, unable to find valid certification path,
			username and password not accepted, host key verification failed`,
	},
	{
		rule: "business", class: riverdlq.ClassBusiness,
		names: `
			authentication required, card error, stripe card error, card declined, * declined, insufficient quota,
			insufficient *, * insufficient, out of stock, * out of stock, expired card, card expired, payment *,
			* payment, business *, balance *, already *, * already exists, * already, conditional check failed,
			* precondition failed, precondition failed, failed precondition, fraud *, not enough *, do not honor,
			spending limit *, credit limit *, billing hard limit reached, charge already refunded,
			transaction refused, payment refused, resource conflict, is archived, * rule violation, opted out,
			conflict`,
	},
	{
		rule: "not-found", class: riverdlq.ClassNotFound,
		names: `
			entity is deleted, unknown channel, unknown message, invalid registration token, invalid device token,
			empty result data access, not found, * not found, * not found *, no such *, does not exist,
			* does not exist, no result, no results, row not found, resource missing, unregistered,
			registration token not registered, gone, enoent, unknown topic *, unknown queue, unknown user *,
			non existent *, nonexistent *, no data found`,
	},

	{
		rule: "decode", class: riverdlq.ClassMalformed,
		names: `content disallowed, gzip *, * gzip *, zlib *`,
		texts: `
			xml syntax error, syntax error on line, unexpected end of json, eof while parsing, ran out of input,
			zlib input, gzip format, invalid gzip header, unexpected end of data, unexpected end of input,
			eof when reading, invalid zip, error parsing json, failed to parse json, jsondecodeerror,
			jsonparseexception`,
	},
	// Invalid configuration of a timeout or a connection.
	{
		rule: "validation", class: riverdlq.ClassValidation,
		names: `invalid timeout, invalid connection *`,
		texts: `
			unsupported protocol scheme, illegal format, protocol … not supported, timeout must,
			timeout … must be, timeout … should be, timeout can't be, timeout cannot be, timeout … cannot be,
			timeout … can't be, timeout value, timeout … is invalid, timeout is required, invalid timeout,
			invalid value for … timeout, timeout is not a, timeout … out of range, timeout … greater than,
			connection is invalid, connection must, connection is required`,
	},

	// From here to the next line "decode", the lines are errors that a retry may resolve.
	{
		rule: rateLimit, class: riverdlq.ClassRateLimited,
		names: `
			rate limit, rate limit *, * rate limit, * rate limit *, rate limited, ratelimited, rate limiter *,
			* rate limiter *, job rate limit *, too many requests, * too many requests, throttling, throttled,
			throttle, * throttling, throttling *, throttled *, * throttled, request limit exceeded,
			limit exceeded, quota, quota *, * quota exceeded, exceeded quota, resource exhausted, slow down,
			flood wait *, retry after, bulkhead full, request not permitted, provisioned throughput exceeded,
			* throughput exceeded, daily limit exceeded, concurrent request limit *, too many * requests,
			too many * updates, request throttled, rejected execution, * rejected execution,
			bandwidth limit exceeded, requests exceeded`,
		texts: `
			queue full, acquire queue has reached, pending acquire queue, rate limit exceeded, rate limits,
			rate limited, rate limiting, exceeded … rate limit, exceed … rate limit, rate exceeded, request rate,
			ratelimit, ratelimited, rate limit reached, rate limit hit, secondary rate limit,
			abuse detection mechanism, rate limiter, ratelimiter, too many requests, too many concurrent requests,
			quota exceeded, exceeded quota, exceeded your current quota, exceeded … quota, quota exhausted,
			quota … exhausted, quota limit reached, quota has been exceeded, check quota, throttled, throttling,
			slow down, resource exhausted, resource has been exhausted, calls per second, requests per second,
			requests per minute, reached … secondly limit, too frequent, bulkhead … full, flood control,
			rejected execution of, wait … would exceed context deadline`,
	},
	{
		rule: "circuit-open", class: riverdlq.ClassOutage,
		names: `
			broken circuit, circuit open, open circuit, circuit breaker, circuit breaker *, circuit *,
			call not permitted, breaker open`,
		texts: `
			circuit … open, circuit breaker … half open, short circuited, circuit breaking, call not permitted`,
	},
	{
		rule: "database-down", class: riverdlq.ClassOutage,
		names: `
			cannot create transaction, too many connections, too many clients, cannot connect now, admin shutdown,
			crash shutdown, connection bad, database down, database connection, cannot get jdbc connection,
			data access resource failure, disk full, read only, readonly, read only sql transaction, masterdown,
			clusterdown, misconf, loading, oom, noreplicas, busy, server selection, no primary, not primary *,
			not writable primary, notwritableprimary, connection pool exhausted`,
		texts: `
			could not resize shared memory, insufficient system memory, table … is full,
			not enough space on the disk, jdbc connection for transaction, unable to acquire jdbc connection,
			failed to obtain jdbc connection, connection pool … exhausted, the database system is,
			too many clients, too many connections, sorry too many, remaining connection slots,
			database connection error, database connection failed, database is down, no space left on device,
			disk is full, disk full, disk quota exceeded, read only transaction, read only replica,
			read only option, read only mode, issued to a replica, cannot be issued to a replica,
			used memory … maxmemory, loading the dataset in memory, unable to persist to disk,
			busy running a script, server selection error, server selection timeout,
			terminating connection due to administrator command, out of shared memory, readonly database,
			no primary, not primary, not master, replicasetnoprimary, index read only, recovery mode,
			is down or inaccessible, could not extend file, database server was not found,
			database … is not currently available, can't reach database server, cannot reach database,
			connections are down, can't contact`,
	},
	{
		rule: "unavailable", class: riverdlq.ClassOutage,
		names: `
			* coordinator not available, unavailable, * unavailable, service not available, server not available,
			broker not available, coordinator not available, leader not available, node not available,
			no node available, no nodes available, no servers available, no living connections, no host available,
			no responders, no shard available *, cluster block, master not discovered, * not ready, shutdown,
			no brokers available, no available brokers, all brokers down, not enough replicas,
			not enough replicas *, overloaded, * overloaded, maintenance, * maintenance, maintenance *,
			gateway timeout, insufficient instance capacity, insufficient storage, enospc, emfile,
			no connected brokers, server shutdown, shutting down, system shutdown`,
		texts: `
			unable to handle the request, coordinator not available, service unavailable,
			service temporarily unavailable, service is currently unavailable, service is unavailable,
			server is unavailable, servers are unavailable, currently unavailable, temporarily unavailable,
			temporarily not available, gateway timeout, gateway time out, coordinator is not available,
			broker is not available, broker not available, leader not available, no leader, brokers are down,
			no brokers available, fewer in sync replicas, no healthy upstream, no living connections,
			no alive nodes, no available brokers, no host available, no responders, no shard available,
			all shards failed, master not discovered, max number of clients reached, not enough memory,
			memory limit exceeded, shutdown in progress, has not yet prepared node, node is recovering,
			interrupted at shutdown, disk i o error, transaction log … is full, no available server,
			all hosts down, no nodes available, no node available, overloaded, under maintenance,
			maintenance mode, down for maintenance, scheduled maintenance, starting up, shutting down, is down,
			too many open files, no available connection, no connections available, connection pool exhausted`,
	},
	{
		rule: "serialization", class: riverdlq.ClassTransient,
		names: `
			pessimistic lock, cannot serialize transaction, * lock lost, deadlock, deadlocked, * deadlock,
			deadlock *, * deadlocked, serialization failure, * serialization failure, could not serialize *,
			lock not available, lock wait *, lock timeout, lock acquisition, cannot acquire lock,
			* lock not available, unable to lock row, pessimistic lock *, optimistic lock, optimistic lock *,
			* optimistic lock *, * optimistic locking *, stale object, stale object *, stale *, sql recoverable,
			concurrency failure, commit failed, resource in use, db update concurrency, * update concurrency,
			transaction canceled, transaction conflict, transaction in progress, transaction in conflict,
			write conflict, * write conflict, lease already present, resource busy, ebusy, object in use,
			operation aborted, transaction rollback, eagain, try again, tryagain, idempotency key in use,
			database locked, sqlite busy, aborted, concurrency`,
		texts: `
			could not place a lock, lock lost, lock supplied is invalid, update conflict,
			being used by another process, could not serialize, deadlock detected, deadlock found, deadlocked,
			was deadlocked, chosen as the deadlock victim, lock wait timeout, lock timeout,
			obtaining a distributed lock, could not obtain lock, failed to acquire lock, could not acquire lock,
			unable to acquire lock, unable to obtain … lock, exclusive access to this record,
			missing lock for job, optimistic lock, stale object, updated or deleted by another transaction,
			modified or deleted since, object has been modified, conflict with recovery,
			tuple concurrently updated, leader changed, transaction conflict, transactionconflict, write conflict,
			database is locked, try restarting transaction, currently accessing it, another in progress request,
			resource temporarily unavailable, retry transaction, already a lease present,
			please apply your changes to the latest version`,
	},
	{
		rule: "timeout", class: riverdlq.ClassTransient,
		names: `
			cancellation, job aborted, timeout, * timeout, timeout expired, timeout rejected, timed out,
			* timed out, deadline exceeded, * deadline exceeded, etimedout, esockettimedout, econnaborted,
			time limit exceeded, soft time limit exceeded, timeoutexpired, execution timeout, task canceled,
			operation canceled, request aborted, request canceled, job cancellation, interrupted, cancelled,
			canceled, context canceled, wait queue timeout, timeout *`,
		texts: `
			canceling statement, was interrupted, interrupted due to, maximum statement execution time,
			lock request time out, timed out, i o timeout, deadline exceeded, deadline … exceeded,
			deadline has elapsed, timeout expired, timeout elapsed, timeout period elapsed, timeout exceeded,
			timeout of … exceeded, timeout reached, timeout performing, timeout during, timeout while,
			timeout waiting, semaphore timeout, operation exceeded time limit, exceeded the time limit,
			maximum execution time … exceeded, timeout awaiting, timeout occurred, timeout after,
			timeout on endpoint, timeout on, request timeout, read timeout, connection timeout, connect timeout,
			connect timed out, idle timeout, response timeout, operation timeout, statement timeout,
			query timeout, socket timeout, socket timed out, execution expired, headers timeout, etimedout,
			esockettimedout, operation time out, could not be completed within,
			could not be completed at this time, query execution was interrupted, maximum execution time exceeded,
			ms has passed since, no heartbeat, missed heartbeats, heartbeat timeout, request aborted,
			request was aborted, request was canceled, context canceled, operation was canceled,
			task was canceled, connector kind timeout, kind timeout, throughput below minimum, stalled more than`,
	},
	{
		rule: "connection", class: riverdlq.ClassTransient,
		names: `
			http host connect, amqp connect, amqp io, mongo socket *, connection, connection refused,
			connection reset, connection aborted, connection closed, connection lost, connection failed,
			connection failure, connection interrupted, connection terminated, connection timeout,
			connection not available, connection does not exist, redis connection, client connection,
			server connection, transient connection, * transient connection, sql connection, http connection,
			tcp connection, new connection, broker connection, amqp connection, connection *, connect,
			connect refused, client connect, stripe connection, api connection, cannot connect, http client,
			communications, network, network io, network timeout, network unreachable, network request failed,
			network connection, * network, socket, broken pipe, epipe, econnreset, econnrefused, enotfound,
			eai again, enetunreach, ehostunreach, enetdown, ehostdown, gai, gaierror, unknown host,
			host unreachable, no route to host, nohttp response, no http response, name resolution,
			* name resolution, dns, dns *, * disconnected,
			incomplete read, incomplete message, chunked encoding, eof, unexpected eof, end of stream,
			premature close, stream premature close, stream reset, stream aborted, client connector, client os,
			remote protocol, already closed, channel closed, closed channel, asynchronous close,
			unresolved address, pool cleared, max retries per request, lost connection, max retry,
			dispatch failure, session closed, stream closed, pool closed, client closed, server closed,
			socket closed, transport closed, unreachable, * unreachable, bad connection, bad conn,
			invalid connection, worker lost`,
		texts: `
			server misbehaving, servfail, connect no such file or directory, conn closed, transport error,
			h2 protocol error, http2 error, invalid connection state, not possible to connect,
			while writing to stream, network name is no longer available, connection abort,
			disconnected by the server, broker transport failure, unknown … server host,
			communications link failure, connection already closed, already been closed by the remote,
			socket disconnected, empty reply from server, ssl error syscall, ssl syscall error, eof detected,
			read error on connection, pool was cleared, topology was destroyed, topology is closed,
			network related or instance specific, physical connection is not usable, no listener,
			end of file on communication channel, name could not be resolved,
			connection could not be established with, eof occurred, curl error 6, curl error 7, curl error 18,
			curl error 28, curl error 52, curl error 55, curl error 56, curl error 92, max retries per request,
			closed network connection, bad connection, transport level error, occurred while sending the request,
			trying to connect, error with our connection, error reading ssh protocol banner, goaway,
			connection reset, connection refused, connection closed, connection aborted, connection lost,
			connection terminated, connection failed, connection failure, connection was reset,
			connection was refused, connection was closed, connection was aborted, connection was forcibly closed,
			connection was lost, connection is closed, connection is not open, connection not open,
			connection has been closed, connection attempt failed, connection terminated unexpectedly,
			connection unexpectedly closed, connection is not available, connection error, connection broken,
			connection dropped, connection to … failed, connection to … lost, connection to … refused,
			closed the connection, closed connection, lost connection, server has gone away, broken pipe,
			econnreset, econnrefused, econnaborted, epipe, enotfound, eai again, enetunreach, ehostunreach,
			unexpected eof, unexpected end of file, socket hang up, socket closed, no such host,
			host is unreachable, network is unreachable, network unreachable, host unreachable, no route to host,
			name or service not known, nodename nor servname, name resolution, getaddrinfo, could not resolve,
			couldn't resolve, cannot resolve host, failed to lookup address, dns error, no connection is active,
			no connection could be made, unable to connect, unabletoconnect, failed to connect,
			could not connect to server, couldn't connect to server, cannot connect to, can't connect to,
			could not connect to … server, error connecting to, network error, networkerror, network failure,
			fetch failed, failed to fetch, transport is closing, transport endpoint is not connected,
			connection prematurely closed, premature close, incompletemessage, incomplete message,
			ssl connection has been closed, error reading from server, error communicating with database,
			remote end closed, remote host terminated, remote host closed, server disconnected, disconnected from,
			unexpectedly closed, channel state closed, channel is closed, channel closed,
			exception while reading from stream, reading from stream, end of stream, were unreachable,
			is unreachable, unreachable destination, tls handshake timeout, max retries exceeded with url`,
	},
	{
		rule: "server-error", class: riverdlq.ClassTransient,
		names: `
			internal server, internal server error, internal, internal failure, internal service, * internal,
			backend, server internal, unknown server, transient, transient *, * transient, temporary *,
			temporarily *, retriable, retriable *, retryable, retryable *, * retryable, server busy,
			* server busy, * busy, bad gateway, not leader *, max attempts exceeded, not leader or follower,
			rebalance in progress`,
		texts: `
			not leader for partition, is currently busy, internal server error, internal service error,
			unexpected server error, unknown server error, unexpected error when processing, server had an error,
			bad gateway, upstream connect error, attempted too many times, worker exited prematurely,
			worker exited, worker failed without, signal killed, signal 9, signal 137, signal terminated, sigkill,
			sigterm, killed by signal, terminated pool size, transaction manager is broken, an internal error,
			internal error occurred, temporary failure, temporary error, transient error, transienterror,
			server busy, server is busy`,
	},

	{
		rule: "decode", class: riverdlq.ClassMalformed,
		names: `
			* decode, decode *, * decoding, parse, parse *, * parse, * parse *, parser,
			* parser, parsing, json error, json exception, json syntax, json reader, json eof, json io,
			json mapping, json processing, json parsing, json serialization, json serializer, unmarshal,
			unmarshal *, * unmarshal, serialization, deserialization, * deserialization, invalid protocol buffer,
			unicode *, malformed, malformed *, * malformed, xml syntax, sax parse, yaml *, mismatched input,
			number format, * format, unexpected token, unexpected character,
			* not readable, utf8, * utf8, xml error, xml exception, invalid data, encoding, encoding *, charset,
			corrupt *, * corrupted, checksum *, unpickling, decrypt, * decrypt, bad decrypt, uri, uri syntax,
			invalid url, invalid uri, bad zip *`,
		texts: `
			error decoding response body, cannot unmarshal, can't unmarshal, cannot decode, could not decode,
			failed to decode, cannot parse, could not parse, failed to parse, failed parsing, unable to parse,
			error parsing, could not convert string to, could not be parsed, cannot deserialize,
			can't deserialize, error while trying to deserialize, error deserializing, failed to deserialize,
			unable to deserialize, invalid character, unexpected character, unexpected token, unrecognized token,
			malformed, expecting value, mismatched tag, not well formed, trailing characters, expected … at line,
			at line … column, wrong number of fields, invalid json, invalid xml, not valid json, not valid xml,
			invalid utf 8, invalid byte sequence, invalid start byte, invalid protocol buffer, wire format,
			not enough segments, not enough or too many segments, payload is invalid, invalid continuation byte,
			recursion limit exceeded, can't decode byte, codec can't decode, invalid base64, illegal base64,
			incorrect padding, bad magic, not a zip file, unknown encoding, invalid literal for int,
			for input string, invalid uuid string, does not match format, missing protocol scheme, no angle addr,
			relative url without a base, invalid start of a value, parsing … invalid syntax, invalid url,
			invalid uri, input string … was not, input string was not in a correct format, checksum mismatch,
			crc mismatch, syntax error in json`,
	},
	{
		rule: "unauthorized", class: riverdlq.ClassUnauthorized,
		names: `expired, * expired, denied, * denied, signature *, * signature, sasl *`,
		texts: `
			not authorized, not authorised, authentication error, authentication required, forbidden,
			access forbidden, not permitted to, not allowed to, does not have permission, do not have permission,
			signature is invalid, signature mismatch, api key … invalid, invalid access key,
			access key id … does not exist, session expired, invalid password, wrong password,
			certificate is not trusted, certificate validation failed, senderid mismatch, no valid credentials,
			missing credentials, unable to load credentials, unable to locate credentials, invalid client,
			invalid grant, publickey`,
	},
	{
		rule: "validation", class: riverdlq.ClassValidation,
		names: `
			duplicates *, validation, * validation, validation *, invalid argument, invalid parameter,
			invalid parameter *, invalid input, invalid value, invalid field, bad request, * bad request,
			unprocessable *, constraint violation, * constraint violation, constraint *, integrity, * integrity,
			data integrity *, integrity constraint *, * integrity constraint *, record invalid, zod error,
			mapper parsing, not null violation, check violation, foreign key *, unique violation, * unique *,
			unique *, record not unique, duplicate *, * duplicate, * too long, * too large, * too small,
			* too big, size limit exceeded, * size limit exceeded, * length exceeded, * limit reached,
			missing parameter, missing parameters, missing field, missing fields, missing required *,
			missing value, missing header, missing argument, * field missing, parameter missing,
			* parameter missing, required, * required, unsupported *, method not allowed, * not valid,
			* not valid *, not acceptable, type mismatch, * type mismatch, * not supported, * not verified,
			* policy violation, out of range, * out of range, argument out of range, data exception,
			string data *, numeric value *, unknown field, unrecognized property, policy violation,
			too many redirects, bad device token, document validation *, schema *, * validation failed,
			message rejected, topic disallowed`,
		texts: `
			incorrect … value, conversion failed, arithmetic overflow error, token too long, validation error,
			validation errors, validation failed, failed validation, validation exception, invalid argument,
			invalid value, invalid input, invalid parameter, invalid field, invalid email, invalid phone,
			invalid recipient, invalid request, invalid date, is invalid, is not valid, is not a valid,
			not a valid, are invalid, is required, are required, required field, required parameter,
			missing required, missing field, missing parameter, must be, must exist, must not be, must have,
			must contain, should be, should not be, cannot be null, cannot be empty, can't be blank,
			cannot be blank, can't be null, can't be empty, can't be negative, cannot be negative, may not be,
			violates … constraint, constraint violation, constraint failed, integrity constraint,
			foreign key constraint, violation of … constraint, cannot insert the value null, invalid input syntax,
			incorrect string value, numeric field overflow, denied the request, is too long, too long for,
			duplicate entry, duplicate key, duplicate value, unique constraint, has already been taken,
			would be truncated, value too long, data too long, out of range, exceeds the maximum, exceeds maximum,
			exceeds the limit, exceeded the maximum, larger than the max, too large, maximum context length,
			context limit, size limits, packet bigger than, maximum allowed size, less than the minimum,
			minimum amount, does not match the schema, no enum constant, unknown field, additional properties,
			not allowed here, expected one of, not one of, unsupported content type, unsupported media type,
			unknown parameter, unrecognized field, not in the allowed, bad request, unprocessable entity,
			violates, not acceptable, should be between`,
	},
	{
		rule: "business", class: riverdlq.ClassBusiness,
		texts: `
			declined, insufficient funds, insufficient balance, sufficient balance, insufficient stock,
			insufficient inventory, not enough stock, not enough inventory, out of stock, sold out,
			already exists, is already, already paid, already shipped, already cancelled, already been refunded,
			already refunded, already been captured, already been paid, already been processed,
			already been cancelled, already been shipped, more inventory than available, has already been,
			business rule, credit limit, merge conflict, conditional request failed, precondition failed,
			unsubscribed, opted out, account is closed, account closed, account is frozen,
			account has been suspended, order is closed, maximum credits, overdrawn, fraud, spending limit,
			payment required, refund`,
	},
	{
		rule: "not-found", class: riverdlq.ClassNotFound,
		texts: `
			redis nil, unknown channel, unknown message, not found, does not exist, doesn't exist, do not exist,
			no rows, no row, no such file or directory, no such file, no such key, no such bucket, no such object,
			no such user, no such queue, no such exchange, no such index, no query results, no results,
			incorrect result size, couldn't find, could not find, cannot find, can't find, unable to find,
			could not be found, cannot be found, does not host this, no longer exists, no longer available,
			was deleted, has been deleted, mailbox unavailable, user unknown, unknown user, unknown recipient,
			unknown topic, exchangenotexist, no queue, no exchange, not present in metadata, unknown database,
			unknown host key, nosuchkey, nosuchbucket, notfound, not registered`,
	},
	{
		rule: "code-bug", class: riverdlq.ClassCodeBug,
		texts: `
			not implemented, unsupported operation, illegal state, is closed, not supported, unimplemented,
			assertion failed, assertion, unreachable code, undefined`,
	},
	{
		rule: "server-error", class: riverdlq.ClassTransient,
		texts: `
			try again later, retry later, try your request again, retry the request, retry your request`,
	},
}

// weak is tried after table. The names in weak describe the operation and not the failure, and the texts are single
// words.
var weak = []line{
	{
		rule: "code-bug", class: riverdlq.ClassCodeBug,
		names: `
			argument error, argument exception, illegal argument, invalid operation, illegal state,
			programming error`,
	},
	{rule: "decode", class: riverdlq.ClassMalformed, names: `syntax error, serde json *, serde *`},
	{
		rule: "validation", class: riverdlq.ClassValidation,
		names: `
			value error, range error, data error, invalid request, invalid *, argument *, domain error,
			domain exception`,
	},
	{rule: "unauthorized", class: riverdlq.ClassUnauthorized, names: `forbidden, * forbidden`},
	{rule: "timeout", class: riverdlq.ClassTransient, texts: `timeout, time out`},
	{rule: "connection", class: riverdlq.ClassTransient, names: `* connection, read error, write error`},
}

// known and lastResort are the indexes of table and weak. rateLimits is an index of only the texts of rate limits.
var (
	known      = newIndex(table)
	lastResort = newIndex(weak)
	rateLimits = newIndex(slices.DeleteFunc(slices.Clone(table), func(l line) bool { return l.rule != rateLimit })).texts
)

// firstTransient is the index of the first line of errors that a retry may resolve.
var firstTransient = slices.IndexFunc(table, func(l line) bool { return l.rule == rateLimit })

// typeExceptions lists errors whose type leads to the wrong line of the table. The text of such an error shows the
// right line.
var typeExceptions = []struct {
	rule  string
	texts *phrases
	is    line
}{
	// Node's fetch reports every network failure as a TypeError.
	{
		"nil-dereference", phrasesOf("fetch failed", "failed to fetch", "load failed", "networkerror when attempting"),
		line{rule: "connection", class: riverdlq.ClassTransient},
	},
	// Rails looks up the records of a job's arguments to deserialize them.
	{"decode", phrasesOf("trying to deserialize arguments"), line{rule: "not-found", class: riverdlq.ClassNotFound}},
	// DynamoDB also cancels a transaction if one of the transaction's conditions is not met.
	{"serialization", phrasesOf("conditional check failed"), line{rule: "business", class: riverdlq.ClassBusiness}},
	// If an object has changed meanwhile, Kubernetes reports a write to it as a conflict.
	{"business", phrasesOf("object has been modified"), line{rule: "serialization", class: riverdlq.ClassTransient}},
	// If a topic does not exist, Kafka's producer waits for it until the producer's timeout.
	{"timeout", phrasesOf("not present in metadata"), line{rule: "not-found", class: riverdlq.ClassNotFound}},
}

// ClassifyStatus returns the class of an HTTP status that is not a success. CDNs use the codes above 511 if their
// origin is down or overloaded (Cloudflare 520 to 527 and 530, others 529). Any other 5xx counts as a 500 (RFC 9110,
// section 15).
func ClassifyStatus(status int) riverdlq.Class {
	switch status {
	case 408, 423, 425:
		return riverdlq.ClassTransient
	case 429:
		return riverdlq.ClassRateLimited
	case 503, 504, 507, 520, 521, 522, 523, 524, 525, 526, 527, 529, 530:
		return riverdlq.ClassOutage
	case 400, 405, 406, 411, 413, 414, 415, 422, 431:
		return riverdlq.ClassValidation
	case 401, 403:
		return riverdlq.ClassUnauthorized
	case 404, 410:
		return riverdlq.ClassNotFound
	case 402, 409, 412:
		return riverdlq.ClassBusiness
	}
	if status >= 500 && status <= 599 {
		return riverdlq.ClassTransient
	}
	return riverdlq.ClassUnknown
}

// isAssigned reports whether HTTP assigns a status or a CDN uses it.
func isAssigned(status int) bool {
	return http.StatusText(status) != "" || ClassifyStatus(status) == riverdlq.ClassOutage
}

// transportTypes are the error types of network errors of deliveries. All of them are transient.
var transportTypes = []string{
	"TIMEOUT_ERROR", "CONNECTION_REFUSED", "CONNECTION_RESET", "CONNECTION_ERROR", "DNS_ERROR", "TLS_ERROR",
}

// grpcClasses maps the names of gRPC status codes, in lower case and without _, to classes.
var grpcClasses = map[string]riverdlq.Class{
	"deadlineexceeded":   riverdlq.ClassTransient,
	"aborted":            riverdlq.ClassTransient,
	"internal":           riverdlq.ClassTransient,
	"resourceexhausted":  riverdlq.ClassRateLimited,
	"unavailable":        riverdlq.ClassOutage,
	"invalidargument":    riverdlq.ClassValidation,
	"outofrange":         riverdlq.ClassValidation,
	"unauthenticated":    riverdlq.ClassUnauthorized,
	"permissiondenied":   riverdlq.ClassUnauthorized,
	"notfound":           riverdlq.ClassNotFound,
	"alreadyexists":      riverdlq.ClassBusiness,
	"failedprecondition": riverdlq.ClassBusiness,
	"unimplemented":      riverdlq.ClassCodeBug,
}

// sqlStates maps a SQLSTATE, or its first three or two characters, to a line.
var sqlStates = map[string]line{
	"08":    {rule: "database-down", class: riverdlq.ClassOutage},
	"08P01": {rule: "sql-bug", class: riverdlq.ClassCodeBug},
	"0A":    {rule: "sql-bug", class: riverdlq.ClassCodeBug},
	"21000": {rule: "sql-bug", class: riverdlq.ClassCodeBug},
	"22":    {rule: "validation", class: riverdlq.ClassValidation},
	"23":    {rule: "validation", class: riverdlq.ClassValidation},
	"25":    {rule: "sql-bug", class: riverdlq.ClassCodeBug},
	"25006": {rule: "database-down", class: riverdlq.ClassOutage}, // read-only: a standby, after a failover
	"25P03": {rule: "timeout", class: riverdlq.ClassTransient},
	"26":    {rule: "sql-bug", class: riverdlq.ClassCodeBug},
	"28":    {rule: "unauthorized", class: riverdlq.ClassUnauthorized},
	"34":    {rule: "sql-bug", class: riverdlq.ClassCodeBug},
	"3D":    {rule: "not-found", class: riverdlq.ClassNotFound},
	"3F":    {rule: "not-found", class: riverdlq.ClassNotFound},
	"40":    {rule: "serialization", class: riverdlq.ClassTransient},
	"42":    {rule: "sql-bug", class: riverdlq.ClassCodeBug},
	"42501": {rule: "unauthorized", class: riverdlq.ClassUnauthorized},
	"53":    {rule: "database-down", class: riverdlq.ClassOutage},
	"54":    {rule: "validation", class: riverdlq.ClassValidation},
	"55006": {rule: "serialization", class: riverdlq.ClassTransient},
	"55P03": {rule: "serialization", class: riverdlq.ClassTransient},
	"57014": {rule: "timeout", class: riverdlq.ClassTransient},
	"57P":   {rule: "database-down", class: riverdlq.ClassOutage},
	"58":    {rule: "database-down", class: riverdlq.ClassOutage},
	"HYT":   {rule: "timeout", class: riverdlq.ClassTransient},
	"P0001": {rule: "business", class: riverdlq.ClassBusiness},
	"P0002": {rule: "not-found", class: riverdlq.ClassNotFound},
}

// smtpClasses maps an SMTP reply (RFC 5321, 4.2.3), or its first digit, to a class.
var smtpClasses = map[string]riverdlq.Class{
	"4":   riverdlq.ClassTransient,
	"421": riverdlq.ClassOutage,
	"5":   riverdlq.ClassBusiness,
	"500": riverdlq.ClassValidation,
	"501": riverdlq.ClassValidation,
	"502": riverdlq.ClassValidation,
	"503": riverdlq.ClassValidation,
	"504": riverdlq.ClassValidation,
	"530": riverdlq.ClassUnauthorized,
	"534": riverdlq.ClassUnauthorized,
	"535": riverdlq.ClassUnauthorized,
	"538": riverdlq.ClassUnauthorized,
	"550": riverdlq.ClassNotFound,
	"551": riverdlq.ClassNotFound,
	"552": riverdlq.ClassValidation,
	"553": riverdlq.ClassValidation,
	"555": riverdlq.ClassValidation,
}
