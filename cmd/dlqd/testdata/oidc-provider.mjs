// npm's oidc-provider on a free port of loopback, for oidc_provider_test.go. Its one user says yes to everything. It prints its issuer,
// and then does what standard input says, line by line: "rotate" has it sign with a new key and withdraw the one before, "clock N" sets
// its clock N seconds ahead, "life N" has ID tokens be good for N seconds. It answers each with "done".
import { generateKeyPairSync } from 'node:crypto';
import { createServer } from 'node:http';
import { createInterface } from 'node:readline';

const { Provider } = await import(`${process.argv[2]}/node_modules/oidc-provider/lib/index.js`);

const now = Date.now;
let ahead = 0;
let life = 120;
Date.now = () => now() + ahead * 1000;

// What it knows outlives a rotation: its own memory would not.
const known = new Map();
class Memory {
  constructor(model) { this.model = model; }
  key(id) { return `${this.model} ${id}`; }
  async upsert(id, payload) { known.set(this.key(id), { ...payload }); }
  async find(id) { return known.get(this.key(id)); }
  async findByUid(uid) { return [...known.values()].find((payload) => payload.uid === uid); }
  async findByUserCode(code) { return [...known.values()].find((payload) => payload.userCode === code); }
  async consume(id) { known.get(this.key(id)).consumed = Math.floor(Date.now() / 1000); }
  async destroy(id) { known.delete(this.key(id)); }
  async revokeByGrantId(grant) { known.forEach((payload, key) => { if (payload.grantId === grant) known.delete(key); }); }
}

const client = (id, secret) => ({
  client_id: id,
  application_type: 'native',
  ...(secret ? { client_secret: secret, token_endpoint_auth_method: 'client_secret_basic' } : { token_endpoint_auth_method: 'none' }),
  redirect_uris: ['http://127.0.0.1/callback', 'http://127.0.0.1/sign-in/callback'],
  grant_types: ['authorization_code', 'refresh_token', 'urn:ietf:params:oauth:grant-type:device_code'],
});

let n = 0;
function newProvider(issuer) {
  const key = generateKeyPairSync('rsa', { modulusLength: 2048 }).privateKey.export({ format: 'jwk' });
  n += 1;
  const provider = new Provider(issuer, {
    adapter: Memory,
    clients: [client('dlqd'), client('another'), client('console', 'a secret of the console\'s')],
    jwks: { keys: [{ ...key, use: 'sig', alg: 'RS256', kid: `key-${n}` }] },
    cookies: { keys: ['a test'] },
    scopes: ['openid', 'offline_access', 'email', 'profile'],
    claims: { openid: ['sub'], email: ['email', 'email_verified'], profile: ['name', 'groups'] },
    conformIdTokenClaims: false, // what the user is called and belongs to is in the ID token
    ttl: { IdToken: () => life, AccessToken: 120, AuthorizationCode: 60, RefreshToken: 3600, Session: 3600, Grant: 3600, Interaction: 600, DeviceCode: 600 },
    features: { devInteractions: { enabled: false }, deviceFlow: { enabled: true }, revocation: { enabled: true } },
    issueRefreshToken: async (_, asking) => asking.grantTypeAllowed('refresh_token'),
    interactions: { url: (_, interaction) => `/interaction/${interaction.uid}` },
    findAccount: (_, id) => ({
      accountId: id,
      claims: async () => ({ sub: id, email: 'kim@example.com', email_verified: true, name: 'Kim', groups: ['ops'] }),
    }),
  });
  provider.use(async (ctx, next) => {
    if (!ctx.path.startsWith('/interaction/')) {
      await next();
      return;
    }
    const { prompt, params, session, grantId } = await provider.interactionDetails(ctx.req, ctx.res);
    if (prompt.name === 'login') {
      await provider.interactionFinished(ctx.req, ctx.res, { login: { accountId: 'u-1' } });
    } else {
      const grant = grantId ? await provider.Grant.find(grantId) : new provider.Grant({ accountId: session.accountId, clientId: params.client_id });
      grant.addOIDCScope(params.scope);
      await provider.interactionFinished(ctx.req, ctx.res, { consent: { grantId: await grant.save() } }, { mergeWithLastSubmission: true });
    }
    ctx.respond = false;
  });
  return provider.callback();
}

let answer;
const server = createServer((request, response) => answer(request, response));
server.listen(0, '127.0.0.1', () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  answer = newProvider(issuer);
  console.log(issuer);
  createInterface({ input: process.stdin }).on('line', (line) => {
    const [command, argument] = line.split(' ');
    if (command === 'rotate') {
      answer = newProvider(issuer);
    } else if (command === 'clock') {
      ahead = Number(argument);
    } else {
      life = Number(argument);
    }
    console.log('done');
  }).on('close', () => process.exit(0));
});
