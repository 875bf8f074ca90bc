#!/usr/bin/env bash
# From nothing to a verified split on a throw-away cluster: kind, LWS 0.10, the embedded engine. Needs docker, kind, kubectl, helm.
#   LWS_CHART=oci://... deploy/e2e-kind.sh    makes the cluster tollbridge-e2e, and deletes it again; the chart's address is in
#                                             LWS's installation guide
#   KEEP=1 ...                                leaves it
#   TARGET=deployments deploy/e2e-kind.sh     without LWS
# The nodes load a model from the internet. Written without a cluster at hand: it has not been run.
set -euo pipefail
cd "$(dirname "$0")/.."

CLUSTER=tollbridge-e2e
NAMESPACE=tollbridge-e2e
TARGET=${TARGET:-disaggregatedset}
if [ "$TARGET" = disaggregatedset ]; then : "${LWS_CHART:?is the address of the Helm chart of LWS}"; fi
TOLLBRIDGE=${TOLLBRIDGE:-.venv/bin/tollbridge}
WORK=$(mktemp -d)
FORWARD=

cleanup() {
  status=$?
  if [ -n "$FORWARD" ]; then kill "$FORWARD" 2>/dev/null || true; fi
  if [ "$status" -ne 0 ]; then
    kubectl --context "kind-$CLUSTER" -n "$NAMESPACE" get pods -o wide || true
    kubectl --context "kind-$CLUSTER" -n "$NAMESPACE" describe pods -l tollbridge.io/role | tail -n 60 || true
    kubectl --context "kind-$CLUSTER" -n "$NAMESPACE" logs -l app.kubernetes.io/component=router --tail=40 || true
  fi
  rm -rf "$WORK"
  if [ -z "${KEEP:-}" ]; then kind delete cluster --name "$CLUSTER" || true; fi
}
trap cleanup EXIT

docker build -q -f containers/router.Dockerfile -t tollbridge/router:0.1.0 .
docker build -q -f containers/embedded.Dockerfile -t tollbridge/embedded:0.1.0 .

cat > "$WORK/kind.yaml" <<'KIND'
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes: [{role: control-plane}, {role: worker}, {role: worker}]
KIND
kind create cluster --name "$CLUSTER" --config "$WORK/kind.yaml" --wait 180s
kind load docker-image --name "$CLUSTER" tollbridge/router:0.1.0 tollbridge/embedded:0.1.0
KUBECTL=(kubectl --context "kind-$CLUSTER")

if [ "$TARGET" = disaggregatedset ]; then
  helm --kube-context "kind-$CLUSTER" install lws "$LWS_CHART" --version 0.10.0 \
    --namespace lws-system --create-namespace --set enableDisaggregatedSet=true --wait
fi

"$TOLLBRIDGE" deploy render --to "$TARGET" --config deploy/clusters/kind.yaml --out "$WORK/base"
"$TOLLBRIDGE" deploy validate "$WORK/base"
"${KUBECTL[@]}" apply --server-side -k "$WORK/base"

echo "waiting for workers and router"
until [ "$("${KUBECTL[@]}" -n "$NAMESPACE" get pods -l tollbridge.io/role -o name | wc -l)" -ge 2 ]; do sleep 2; done
"${KUBECTL[@]}" -n "$NAMESPACE" wait pods -l tollbridge.io/role --for=condition=Ready --timeout=900s
"${KUBECTL[@]}" -n "$NAMESPACE" rollout status deployment/tb-router --timeout=300s

"${KUBECTL[@]}" -n "$NAMESPACE" port-forward service/tb-router 18000:8000 >/dev/null &
FORWARD=$!
until curl -fsS http://127.0.0.1:18000/health >/dev/null 2>&1; do
  kill -0 "$FORWARD"
  sleep 1
done

ask() {
  curl -fsS -D "$WORK/headers" -o "$WORK/body" http://127.0.0.1:18000/v1/completions -H 'content-type: application/json' \
    -d "{\"model\": \"smollm2\", \"max_tokens\": 32, \"prompt\": \"$1 $(seq -s ' ' 1 200)\"}"
  grep -i '^x-tollbridge-decision:' "$WORK/headers"
}
ask first | grep -q '"choice":"split"'
ask second | tee "$WORK/decision" | grep -q '"verified":true'
cat "$WORK/decision"

echo "a rollout: the revision changes, and the service comes back"
sed 's/kv_cache_mib: 256/kv_cache_mib: 320/' deploy/clusters/kind.yaml > "$WORK/changed.yaml"
"$TOLLBRIDGE" deploy render --to "$TARGET" --config "$WORK/changed.yaml" --out "$WORK/base"
revision=$(grep -m1 -o 'tollbridge.io/revision: .*' "$WORK/base/workers.yaml" | tr -d "'\" " | cut -d: -f2)
"${KUBECTL[@]}" apply --server-side -k "$WORK/base"
for _ in $(seq 1 300); do
  ready=$("${KUBECTL[@]}" -n "$NAMESPACE" get pods -l "tollbridge.io/role,tollbridge.io/revision=$revision" \
    -o jsonpath='{range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}' | grep -c True || true)
  if [ "$ready" -ge 2 ]; then break; fi
  sleep 3
done
[ "$ready" -ge 2 ]
for _ in $(seq 1 60); do
  if ask again 2>/dev/null | grep -q '"verified":true'; then echo "verified again"; exit 0; fi
  sleep 2
done
echo "no verified split after the rollout" >&2
exit 1
