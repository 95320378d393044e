import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vite';

export default defineConfig({
  base: '/ui/',
  plugins: [svelte({ compilerOptions: { runes: true } })],
  build: {
    target: 'es2022',
    cssTarget: ['chrome123', 'firefox120', 'safari17.5'],
    outDir: process.env.WINDLASS_WEB_DIST ?? 'dist',
    emptyOutDir: true,
    assetsInlineLimit: 0,
    // One sheet for all pages: it compresses better, and no page is drawn before its styles are there.
    cssCodeSplit: false,
    sourcemap: false,
    reportCompressedSize: false,
    // Pages of one section compress better together, and are loaded together.
    rolldownOptions: {
      output: {
        codeSplitting: {
          includeDependenciesRecursively: false,
          groups: [
            { name: 'more', test: /src\/pages\/(Admin|Costs|Projects?|Usage|Events|Me)\.svelte|src\/components\/(Backends|Limits|Sharing|Tokens)\.svelte/ },
            { name: 'work', test: /src\/pages\/(Jobs?|Services?|Queue|Containers)\.svelte|src\/components\/(Dispatchers|TaskGraph|Playground)\.svelte/ },
            { name: 'run', test: /src\/pages\/(Run|Compare)\.svelte|src\/components\/(RunLogs|LogView|RunMetrics|RunConfiguration|TerminalTab|Raw|Previous)\.svelte/ },
            { name: 'detail', test: /src\/components\/(Why|Timeline|Story|Code|Diff|Deployments|Plot|Tabs)\.svelte/ },
            { name: 'capacity', test: /src\/pages\/(Fleets?|Instances?|Offers|Volumes|Gateways)\.svelte|src\/components\/(InstanceTable|OfferTable)\.svelte/ },
          ],
        },
      },
    },
    modulePreload: { polyfill: false },
    chunkSizeWarningLimit: 900,
  },
  worker: { format: 'es' },
});
